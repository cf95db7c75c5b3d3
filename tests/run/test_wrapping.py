"""fsdp_config that does not fit the model is refused, before its weights are loaded and for the loaded model."""

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from ebft.errors import ConfigError
from ebft.run.model_checks import check_adapted_experts, check_wrapping, check_wrapping_of
from tests.config.conftest import make

__all__ = ["make"]


def check(config, folder):
    check_wrapping_of(config, AutoConfig.from_pretrained(folder))
    check_wrapping(config, AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize(
    ("details", "message"),
    [
        ({"transformer_layer_cls_to_wrap": "Bogus"}, "no module of the class 'Bogus'. Without the key, the classes"),
        ({"transformer_layer_cls_to_wrap": ["LlamaDecoderLayr"]}, "Did you mean LlamaDecoderLayer?"),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1}, "also selects model.layers, a list of modules"),
    ],
)
def test_modules_that_cannot_be_sharded(make, tiny_llama_dir, details, message):
    config = make(fsdp=True, fsdp_config=details)
    with pytest.raises(ConfigError, match=message):
        check_wrapping_of(config, AutoConfig.from_pretrained(tiny_llama_dir))
    with pytest.raises(ConfigError, match=message):
        check_wrapping(config, AutoModelForCausalLM.from_pretrained(tiny_llama_dir))


def test_modules_that_can_be_sharded(make, tiny_llama_dir):
    layers = AutoModelForCausalLM.from_pretrained(tiny_llama_dir).model.layers
    size = sum(parameter.numel() for parameter in layers.parameters())
    by_size = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": size}
    check(make(fsdp=True, fsdp_config=by_size), tiny_llama_dir)
    with pytest.raises(ConfigError, match=f"or set min_num_params to at least {size}"):
        check(make(fsdp=True, fsdp_config={**by_size, "min_num_params": size - 1}), tiny_llama_dir)
    check(make(fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}), tiny_llama_dir)
    check(make(fsdp=True), tiny_llama_dir)
    check(make(), tiny_llama_dir)


def test_adapters_of_experts_exclude_what_replaces_weights(make):
    settings = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("mixtral", **settings, vocab_size=32, num_key_value_heads=1, num_local_experts=2)
    model = AutoModelForCausalLM.from_config(config)
    keys = {"adapter": "lora", "lora_r": 2, "lora_alpha": 4, "lora_target_linear": True}
    check_adapted_experts(make(**keys, fsdp=True), model)
    model = get_peft_model(model, LoraConfig(target_modules=["w1", "w2", "w3"]))
    check_adapted_experts(make(**keys), model)
    with pytest.raises(ConfigError, match="lora_target_linear: true, which adapts the fused experts .* with fsdp"):
        check_adapted_experts(make(**keys, fsdp=True), model)
