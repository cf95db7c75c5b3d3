"""Rounding during training is what quantisation does afterwards, in forward passes of the trained model alone."""

import copy

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_
from transformers import AutoModelForCausalLM

from ebft import train
from ebft.config.keys.models import QatSection
from ebft.errors import ModelError
from ebft.methods.base_config import QuantizationSection
from ebft.models.weights import prepare_rounding, round_weights, torchao_settings
from tests.strided.families import tiny_model


@pytest.mark.parametrize("keys", [
    {"weight_dtype": "int8"}, {"weight_dtype": "int4", "activation_dtype": "int8", "group_size": 16},
])  # fmt: skip
def test_layers_round_as_they_are_quantised(keys):
    model = tiny_model("llama").eval()
    plain, quantised, ids = copy.deepcopy(model), copy.deepcopy(model), torch.arange(3, 30)[None]
    prepare_rounding(model, QatSection(**keys))
    frozen = copy.deepcopy(model)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=0)
    round_weights(model)
    settings = torchao_settings(QuantizationSection(**keys), torch.device("cpu"))
    quantize_(quantised, settings, lambda module, name: isinstance(module, nn.Linear) and name != "lm_head")
    wanted = quantised(ids).logits
    torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-3, atol=1e-3)
    assert (wanted - plain(ids).logits).abs().max() > 0.01
    torch.testing.assert_close(frozen(ids).logits, plain(ids).logits, rtol=0, atol=0)
    model(ids).logits.square().sum().backward()
    assert all(weight.grad.abs().sum() > 0 for weight in model.parameters())
    assert model.state_dict().keys() == plain.state_dict().keys()


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
