"""Loading the base model: type, placement, vocabulary and limits."""

import gc
import importlib.util
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, PreTrainedConfig

from ebft.errors import ModelError
from ebft.models import load, pretrained
from ebft.models.weights import unpacked_size
from ebft.monitor.budget import forward_flops
from ebft.tools.export.adapter import BitsAndBytesRounding
from ebft.transformers_internals import name_in_checkpoint, stored_names
from tests.config.conftest import warned
from tests.file_edits import as_mxfp4
from tests.models.multimodal import MULTIMODAL, save_multimodal, text_logits
from tests.strided.families import tiny_model


@pytest.fixture
def tokenizer(make_config):
    return pretrained.load_tokenizer(make_config(special_tokens={"pad_token": "<|end|>"}))


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", *(pytest.param(kind, marks=pytest.mark.slow) for kind in (
    "lfm2_vl", "llava", "mistral3", "smolvlm"))])  # fmt: skip
def test_the_text_model_of_a_multimodal_one(kind, make_base, make_config, tokenizer, tmp_path):
    whole = save_multimodal(kind, base := make_base())
    with pytest.warns(UserWarning, match="the text model of a multimodal model is loaded, .*, without .. tensors"):
        model = load.load_model(make_config(base_model=base), tokenizer)
    assert (type(model).__name__, model.config.name_or_path) == (MULTIMODAL[kind][0], base)
    assert torch.equal(text_logits(model), text_logits(whole))
    stored = load_file(Path(base) / "model.safetensors").keys()  # what vLLM has
    assert {name_in_checkpoint(model, name) for names in stored_names(model).values() for name in names} <= stored
    model.save_pretrained(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(saved) is type(model) and torch.equal(text_logits(saved), text_logits(whole))


@pytest.mark.parametrize(("keys", "dtype"), [
    ({}, torch.float32), ({"bf16": True}, torch.bfloat16),
    ({"bf16": False, "torch_dtype": "bfloat16", "attn_implementation": "eager"}, torch.bfloat16),
])  # fmt: skip
def test_weights_dtype_and_attention(make_config, tokenizer, monkeypatch, keys, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = make_config(**keys)
    model = load.load_model(config, tokenizer)
    assert load.weights_dtype(config) == model.dtype == dtype
    assert model.config._attn_implementation == keys.get("attn_implementation", "sdpa")
    assert model.config.pad_token_id == model.generation_config.pad_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize(("family", "has_cuda", "lacking"), [
    ("llama", False, "no CUDA device is available"), ("gemma2", True, "its package is not installed"),
])  # fmt: skip
def test_attention_that_cannot_be_used(family, has_cuda, lacking, make_config, tokenizer, make_base, monkeypatch):
    """The model is loaded with transformers' choice: Gemma 2 and gpt-oss do not support sdpa."""
    base = make_base(tiny_model(family, vocab_size=len(tokenizer)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    message = f"flash_attention_2 cannot be used .{lacking}.*: the model's default is used"
    with pytest.warns(UserWarning, match=message) as caught:
        model = load.load_model(make_config(base_model=base, flash_attention=True), tokenizer)
    assert len(caught) == 1 and model.config._attn_implementation == ("sdpa" if family == "llama" else "eager")


LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}
FOUR_BITS = {**LORA, "adapter": "qlora", "load_in_4bit": True}
BITSANDBYTES = {"bnb_4bit_use_double_quant": False, "bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": "bfloat16"}
EIGHT_BITS = {**LORA, "load_in_8bit": True}
DEFAULTS = {"quant_type": "nf4", "use_double_quant": True, "compute_dtype": torch.float32, "quant_storage": torch.uint8}


@pytest.mark.parametrize(("keys", "given", "expected"), [
    (FOUR_BITS, {**BITSANDBYTES, "blocksize": 64},
     {"use_double_quant": False, "quant_type": "fp4", "quant_storage": torch.bfloat16}),
    (FOUR_BITS, {"bnb_4bit_compute_dtype": "bfloat16"}, {"compute_dtype": torch.bfloat16}),
    (EIGHT_BITS, {"llm_int8_threshold": 5.0}, {}),
])  # fmt: skip
def test_settings_of_bitsandbytes(make_config, monkeypatch, keys, given, expected):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    found = load.quantisation_config(make_config(**keys, bnb_config_kwargs=given), PreTrainedConfig())
    assert {name: getattr(found, f"bnb_4bit_{name}") for name in DEFAULTS} == DEFAULTS | expected
    assert (found.load_in_8bit, found.llm_int8_threshold) == ((True, 5.0) if keys is EIGHT_BITS else (False, 6.0))


def test_a_model_with_settings_of_bitsandbytes(make_config, tokenizer):
    functional = pytest.importorskip("bitsandbytes").functional
    layer = lambda model: model.get_base_model().model.layers[0].mlp.up_proj
    dense = load.load_model(make_config(**LORA), tokenizer)
    model = load.load_model(make_config(**FOUR_BITS, bnb_config_kwargs=BITSANDBYTES), tokenizer)
    weight = layer(model).weight
    assert weight.dtype == torch.bfloat16 and unpacked_size(weight) == layer(dense).weight.numel()
    stored = functional.quantize_4bit(layer(dense).weight.data, quant_type="fp4", compress_statistics=False)
    found = functional.dequantize_4bit(weight.data, weight.quant_state)
    assert torch.equal(found, functional.dequantize_4bit(*stored))
    assert forward_flops(model, 7, 3) == forward_flops(dense, 7, 3)
    ids, gradients = torch.arange(5, 25).view(2, 10), []
    for _ in range(2):  # the second time after a pass without gradients, for which bitsandbytes repacks weights on CPUs
        model.train()(ids, labels=ids).loss.backward()
        gradients.append([weight.grad.clone() for name, weight in model.named_parameters() if "lora_B" in name])
        model.zero_grad()
        with torch.no_grad():
            model.eval()(ids)
    assert all(gradient.abs().max() > 0 for gradient in gradients[1])
    torch.testing.assert_close(*gradients)


def test_random_weights_keep_the_rest_of_the_model(make_base, make_config, tokenizer):
    base = make_base(initializer_range=0.1)
    given, found = (load.load_model(make_config(base_model=base, reinit_weights=on), tokenizer) for on in (False, True))
    assert found.generation_config.to_dict() == given.generation_config.to_dict()
    for (name, old), new in zip(given.named_parameters(), found.parameters(), strict=True):
        assert old.dtype == new.dtype and (old.equal(new) == name.endswith("norm.weight"))
        assert old.dim() == 1 or new.std().item() == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("kind, bits", [("qwen3_moe", 4), ("qwen3_moe", 8), ("gemma4", 4)])
@pytest.mark.filterwarnings("ignore:.*the text model of a multimodal model is loaded")
def test_quantised_experts(kind, bits, make_base, make_config, tokenizer):
    """Loss and gradients are those of a dense model with the weights that quantisation leaves."""
    functional = pytest.importorskip("bitsandbytes").functional
    base = make_base(tiny_model(kind)) if kind != "gemma4" else make_base()
    if kind == "gemma4":
        save_multimodal(kind, base)
    keys = {"base_model": base, "adapter": "qlora" if bits == 4 else "lora", f"load_in_{bits}bit": True, "lora_r": 4}
    keys |= {"lora_target_modules": ["q_proj"], "lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    packed = load.load_model(make_config(**keys, quantize_moe_experts=True), tokenizer)
    whole = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.dim() == 3]
    assert not any(each.is_floating_point() and each.shape[0] == packed.config.num_experts for each in whole)
    dense = load.load_model(make_config(**keys), tokenizer)
    for weight in dense.parameters():
        if weight.dim() == 3:
            if bits == 4:
                stored = functional.quantize_4bit(weight.data, quant_type="nf4", compress_statistics=True)
                weight.data = functional.dequantize_4bit(*stored)
            else:
                stored, largest, _ = functional.int8_vectorwise_quant(weight.data.half().flatten(0, 1))
                weight.data = (stored * largest[:, None] / 127).view(weight.shape)
    stored = [weight for weight in packed.parameters() if weight.dim() == 3]
    assert len(stored) == sum(weight.dim() == 3 for weight in dense.parameters()) >= 4
    assert {weight.dtype for weight in stored} == {torch.uint8 if bits == 4 else torch.int8}
    assert forward_flops(packed, 7, 3) == forward_flops(dense, 7, 3)
    packed.gradient_checkpointing_enable({"use_reentrant": False})
    gradients = []
    for model in (dense, packed):
        torch.manual_seed(1)
        for name, weight in model.train().named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(weight, std=0.1)
        ids = torch.arange(5, 25).view(2, 10)
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    assert len(gradients[0]) == len(gradients[1]) >= 8
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6)
    with dense.disable_adapter(), packed.disable_adapter():  # in bitsandbytes, products without gradient differ by 1e-4
        assert torch.allclose(dense(ids, use_cache=False).logits, packed(ids, use_cache=False).logits, atol=1e-3)


@pytest.mark.parametrize("kind, keys, left", [
    ("falcon_h1", FOUR_BITS, ("out_proj", "lm_head")), ("llama", FOUR_BITS, ("lm_head",)),
    ("deepseek_v3", FOUR_BITS, ("lm_head",)), ("deepseek_v3", EIGHT_BITS, ("kv_b_proj", "lm_head")),
])  # fmt: skip
def test_layers_that_are_not_quantised(kind, keys, left, make_base, make_config, tokenizer):
    """Neither while loading, nor when an adapter is merged."""
    layers, base = ("Linear4bit", "Linear8bitLt"), tiny_model(kind)
    config = make_config(base_model=make_base(base), **keys)
    model = load.load_base_model(config, tokenizer)
    packed = {name for name, module in model.named_modules() if type(module).__name__ in layers}
    linear = {name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)}
    assert packed == {name for name in linear if not name.endswith(left)} != linear
    rounding = BitsAndBytesRounding(base, config)
    assert packed == {name for name in linear if rounding.covers(f"{name}.weight")}


def embeddings(make_config, **keys):
    config = make_config(special_tokens={"pad_token": "<|end|>"}, **keys)
    tokenizer = pretrained.load_tokenizer(config)
    return len(tokenizer), load.load_base_model(config, tokenizer).get_input_embeddings().weight


def test_new_tokens_and_the_size_of_embeddings(make_config, make_base):
    before, weight = embeddings(make_config)
    assert weight.shape[0] == before == 512
    tokens, weight = embeddings(make_config, tokens=["<new>", "<newer>"])
    assert weight.shape[0] == tokens == 514
    large = make_base(vocab_size=600)
    assert embeddings(make_config, base_model=large)[1].shape[0] == 600
    assert embeddings(make_config, base_model=large, shrink_embeddings=True)[1].shape[0] == 512
    assert embeddings(make_config, tokens=["<new>"], resize_token_embeddings_to_32x=True)[1].shape[0] == 544
    config = make_config(special_tokens={"pad_token": "<|end|>", "additional_special_tokens": ["<tool>"]})
    tokenizer = pretrained.load_tokenizer(config)
    assert len(tokenizer) == 513 and tokenizer.tokenize("a<tool>b")[1] == "<tool>"
    config = make_config(special_tokens={"pad_token": "<|pad|>"})
    model = load.load_model(config, pretrained.load_tokenizer(config))
    assert model.get_input_embeddings().num_embeddings == model.get_output_embeddings().out_features == 513


@pytest.mark.parametrize(("keys", "frozen"), [
    ({"tokens": ["<new>"]}, "tokens: the adapter does not train embed_tokens and lm_head"),
    ({"tokens": ["<new>"], "lora_target_modules": ["embed_tokens", "lm_head"], "lora_target_linear": False}, None),
    ({"additional_special_tokens": ["<new>"]}, "special_tokens.additional_special_tokens: the adapter does not"),
])  # fmt: skip
def test_new_tokens_that_an_adapter_does_not_train(make_config, keys, frozen):
    special = {"pad_token": "<|end|>", "additional_special_tokens": keys.get("additional_special_tokens")}
    keys = {key: value for key, value in keys.items() if key != "additional_special_tokens"}
    config = make_config(special_tokens=special, **{**LORA, **keys})
    _, said = warned(load.load_model, config, pretrained.load_tokenizer(config))
    found = [text for text in said if "initial values" in text]
    assert len(found) == (frozen is not None) and all(message.startswith(frozen) for message in found)
    assert all("such as <new> keep" in text and "to_save: [embed_tokens, lm_head]" in text for text in found)


def test_new_embeddings_are_near_the_mean_of_the_others(make_config):
    keys = {"tokens": [f"<{index}>" for index in range(50)]}
    new = [embeddings(make_config, **keys, mean_resizing_embeddings=mean)[1][512:] for mean in (True, False)]
    assert new[0].std(0).mean() < 1e-3 < new[1].std(0).mean()


def test_the_computation_of_experts(make_config, make_base):
    base = make_base(tiny_model("mixtral", vocab_size=512))
    for wanted in ("eager", "batched_mm"):
        config = make_config(base_model=base, experts_implementation=wanted)
        found = load.load_base_model(config, pretrained.load_tokenizer(config))
        assert found.get_experts_implementation()[""] == wanted
    with pytest.raises(ModelError, match=r"overrides_of_model_config.router_aux_loss_coef: a llama model has no such"):
        embeddings(make_config, overrides_of_model_config={"router_aux_loss_coef": 0.1})


def layer(dtype, value=0.02, trained=True):
    model = nn.Linear(8, 8, bias=False).to(dtype)
    model.weight.data.fill_(value)
    return model.requires_grad_(trained)


def test_steps_that_bfloat16_loses_are_warned_of():
    bfloat16, float32 = layer(torch.bfloat16), layer(torch.float32)
    with pytest.warns(UserWarning, match="learning_rate: 1e-06 .* changes 0.0% of the weights.*torch_dtype: float32"):
        load.warn_of_lost_steps(bfloat16, 1e-6)
    adapted = nn.Sequential(layer(torch.bfloat16, trained=False), float32)
    with warnings.catch_warnings(action="error"):
        for model, rate in ((bfloat16, 1e-3), (float32, 1e-6), (adapted, 1e-6)):
            load.warn_of_lost_steps(model, rate)


def test_weights_stored_in_mxfp4_are_dequantised_and_trained(make_config, tokenizer, tmp_path):
    layers = dict(num_hidden_layers=1, num_local_experts=2, num_experts_per_tok=1, layer_types=["full_attention"])
    layers |= dict(hidden_size=32, intermediate_size=32)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    model = GptOssForCausalLM(GptOssConfig(vocab_size=len(tokenizer), **layers, **heads))
    model.save_pretrained(tmp_path)
    expected = as_mxfp4(tmp_path)
    keys = {"model_quantization_config": "Mxfp4Config", "model_quantization_config_kwargs": {"dequantize": True}}
    for precision in ({"bf16": False}, {"torch_dtype": "bfloat16", **keys}):
        loaded = load.load_base_model(make_config(base_model=str(tmp_path), **precision), tokenizer)
        (dtype,) = {weight.dtype for weight in loaded.parameters()}
        assert dtype is (torch.bfloat16 if keys.items() <= precision.items() else torch.float32)
        found = dict(loaded.named_parameters())
        assert len(expected) == 2 and all(torch.equal(found[name], expected[name].to(dtype)) for name in expected)
    loaded(torch.arange(8)[None]).logits.sum().backward()
    assert all(found[name].grad.abs().sum() > 0 for name in expected)
    model.save_pretrained(tmp_path / "dense")
    with pytest.warns(UserWarning, match="model_quantization_config: Mxfp4Config has no effect: the weights of"):
        load.load_base_model(make_config(base_model=str(tmp_path / "dense"), **keys), tokenizer)
