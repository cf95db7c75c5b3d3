"""fsdp_config that does not fit the model is refused, before its weights are loaded and for the loaded model."""

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from ebft.errors import ConfigError
from ebft.run.checks import check_adapted_experts, check_wrapping, check_wrapping_of
from tests.config.conftest import make

__all__ = ["make"]

BY_SIZE = {"auto_wrap_policy": "SIZE_BASED_WRAP"}
CLASS = "transformer_layer_cls_to_wrap"


def test_modules_that_can_and_that_cannot_be_sharded(make, tiny_llama_dir):
    config, model = AutoConfig.from_pretrained(tiny_llama_dir), AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    size = sum(parameter.numel() for parameter in model.model.layers.parameters())
    of_size = lambda size: {"fsdp": True, "fsdp_config": {**BY_SIZE, "min_num_params": size}}
    of_class = lambda name: {"fsdp": True, "fsdp_config": {CLASS: name}}
    for keys in ({}, {"fsdp": True}, of_class("LlamaDecoderLayer"), of_size(size)):
        check_wrapping_of(make(**keys), config)
        check_wrapping(make(**keys), model)
    for keys, message in (
        (of_class("Bogus"), "no module of the class 'Bogus'. Without the key, the classes"),
        (of_class(["LlamaDecoderLayr"]), "Did you mean LlamaDecoderLayer?"),
        (of_size(1), "also selects model.layers, a list of modules"),
        (of_size(size - 1), f"or set min_num_params to at least {size}"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_wrapping_of(make(**keys), config)
        with pytest.raises(ConfigError, match=message):
            check_wrapping(make(**keys), model)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")  # of PEFT
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
