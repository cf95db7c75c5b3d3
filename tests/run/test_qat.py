"""Rounding during training is what quantisation does afterwards, in forward passes of the trained model alone."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_
from transformers import AutoModelForCausalLM

from ebft import train
from ebft.config.keys.models import QatSection
from ebft.errors import ModelError
from ebft.methods.base_config import QuantizationSection
from ebft.models.weights import prepare_float8, prepare_rounding, round_weights, torchao_settings
from ebft.sft import packed
from tests.run.crash import config_of
from tests.strided.families import tiny_model


def ternary(row):
    size = row.abs().sum() / len(row)
    return torch.tensor([0.0 if value.abs() < size / 2 else value.sign() * size for value in row])


def in_eight_bits(token):
    return (token * 127 / token.abs().max()).round() * token.abs().max() / 127


@pytest.mark.parametrize("keys", [
    {"weight_dtype": "int8"}, {"weight_dtype": "int4", "activation_dtype": "int8", "group_size": 16},
    {"weight_dtype": "ternary"}, {"weight_dtype": "ternary", "activation_dtype": "int8"},
])  # fmt: skip
def test_layers_round_as_they_are_quantised(keys):
    model = tiny_model("llama").eval()
    model = model.double() if keys["weight_dtype"] == "ternary" else model  # rounding magnifies rounding errors
    plain, quantised, ids = copy.deepcopy(model), copy.deepcopy(model), torch.arange(3, 30)[None]
    prepare_rounding(model, QatSection(**keys))
    frozen = copy.deepcopy(model)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=0)
    round_weights(model)
    is_linear = lambda module, name: isinstance(module, nn.Linear) and name != "lm_head"
    if keys["weight_dtype"] == "ternary":
        for layer in (layer for name, layer in quantised.named_modules() if is_linear(layer, name)):
            layer.weight.data = torch.stack([ternary(row) for row in layer.weight.data])
            if "activation_dtype" in keys:
                layer.register_forward_pre_hook(lambda _, given: torch.stack([*map(in_eight_bits, given[0][0])])[None])
    else:
        quantize_(quantised, torchao_settings(QuantizationSection(**keys), torch.device("cpu")), is_linear)
    wanted = quantised(ids).logits
    torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-3, atol=1e-3)
    assert (wanted - plain(ids).logits).abs().max() > 0.01
    torch.testing.assert_close(frozen(ids).logits, plain(ids).logits, rtol=0, atol=0)
    model(ids).logits.square().sum().backward()
    assert all(weight.grad.abs().sum() > 0 for weight in model.parameters())
    assert model.state_dict().keys() == plain.state_dict().keys()


class Float8Product(torch.autograd.Function):
    @staticmethod
    def rounded(x, dtype):
        scale = torch.finfo(dtype).max / x.abs().max()
        return (x * scale).to(dtype).float() / scale

    @staticmethod
    def forward(context, x, weight):
        x, weight = (Float8Product.rounded(each, torch.float8_e4m3fn) for each in (x, weight))
        context.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(context, gradient):
        (x, weight), gradient = context.saved_tensors, Float8Product.rounded(gradient, torch.float8_e5m2)
        return gradient @ weight, (gradient.flatten(0, -2).T @ x.flatten(0, -2))


def test_products_in_float8():
    """Values and gradients are those of products of rounded tensors; the number of tokens, 33, is padded."""
    model = tiny_model("llama", hidden_size=32, intermediate_size=64).train()
    plain, naive, ids = copy.deepcopy(model), copy.deepcopy(model), torch.arange(3, 36).view(3, 11)
    prepare_float8(model)
    frozen = copy.deepcopy(model)
    round_weights(model)
    for name, layer in naive.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            layer.forward = partial(lambda layer, x: Float8Product.apply(x, layer.weight), layer)
    ours, expected, before = ([each(ids, labels=ids).loss, *each.parameters()] for each in (model, naive, plain))
    for found in (ours, expected, before):
        found[0].backward()
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-5, atol=1e-5)
    for mine, other in zip(ours[1:], expected[1:], strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-3 * other.grad.abs().max().item())
    assert (ours[0] - before[0]).abs() > 1e-5
    torch.testing.assert_close(frozen(ids).logits, plain(ids).logits, rtol=0, atol=0)
    assert model.state_dict().keys() == plain.state_dict().keys()
    with pytest.raises(ModelError, match="fp8 finds no linear layers"):
        prepare_float8(tiny_model("llama", hidden_size=24, intermediate_size=40))


def test_embeddings_and_mxfp4():
    model, ids = tiny_model("llama", hidden_size=32, intermediate_size=64).eval(), torch.arange(3, 30)[None]
    before = model(ids).logits
    both = {"weight_dtype": "mxfp4", "activation_dtype": "mxfp4"}
    for section in ({"weight_dtype": "int4", "quantize_embedding": True}, both):
        rounding = copy.deepcopy(model)
        prepare_rounding(rounding, QatSection(**section))
        round_weights(rounding)
        assert 0.01 < (rounding(ids).logits - before).abs().max() < before.abs().max()
        assert (type(rounding.get_input_embeddings()) is nn.Embedding) == (section is both)
    for family, section, message in (
        ("llama", {"weight_dtype": "nvfp4", "activation_dtype": "nvfp4"}, "with nvfp4 needs a GPU"),
        ("gemma3_text", {"quantize_embedding": True}, "cannot round embeddings that are scaled|also the output layer"),
        ("llama", {"group_size": 7}, "group_size: 7 does not divide"), ("gpt2", {}, "finds no linear layers"),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=message):
            prepare_rounding(tiny_model(family), QatSection(**section))
    prepare_rounding(router := tiny_model("phimoe"), QatSection())
    assert router(ids).logits.isfinite().all()


def test_a_run_rounds_after_some_steps_and_saves_what_is_not_rounded(make, out):
    losses = {}
    for after in (None, 2, 9):
        keys = {"qat": {"weight_dtype": "int4", "group_size": 8, "fake_quant_after_n_steps": after}}
        keys |= {"max_steps": 3, "logging_steps": 1, "learning_rate": 1e-5, "output_dir": f"{out}{after}"}
        trainer = train(make(**keys)).trainer
        losses[after] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        saved = AutoModelForCausalLM.from_pretrained(f"{out}{after}").state_dict()
        assert all(saved[name].equal(weight) for name, weight in trainer.model.state_dict().items())
    assert losses[2][:2] == losses[9][:2] and losses[2][2] != losses[9][2] and losses[None][0] != losses[9][0]


@pytest.mark.parametrize("method", ["strided_full", "structured_full"])
def test_runs_in_float8(method, inputs, tmp_path):
    ends = []
    for fp8 in (False, True):
        config = config_of(method, inputs, tmp_path / str(fp8), fp8=fp8, max_steps=2, eval_steps=1, logging_steps=1)
        trainer = train(config).trainer
        ends.append([entry for entry in trainer.state.log_history if "loss" in entry][-1])
    assert ends[1]["grad_norm"] != ends[0]["grad_norm"]  # samples differ, too
    assert ends[1]["entropy"] == pytest.approx(ends[0]["entropy"], rel=0.02)


def test_packed_documents_are_compared_without_rounding(make, monkeypatch):
    rounds = lambda model: any(type(module).__module__.startswith("torchao.") for module in model.modules())
    seen, compare = [], packed.why_not_separated
    monkeypatch.setattr(
        packed, "why_not_separated", lambda model, *given: seen.append(rounds(model)) or compare(model, *given)
    )
    trainer = train(make(fp8=True, sample_packing=True, sequence_len=96)).trainer
    assert seen == [False] and rounds(trainer.model)
