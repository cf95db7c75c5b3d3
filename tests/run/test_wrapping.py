"""fsdp_config that does not fit the model is refused, before its weights are loaded and for the loaded model."""

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from ebft.errors import ConfigError
from ebft.run.wrapping import check_wrapping, check_wrapping_of
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
