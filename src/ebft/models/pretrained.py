"""Loading by name: a folder, a GGUF file, a model of `ebft fetch`, or a hub id, as `from_pretrained` takes the rest.

The trainers' `model=`, the config's `base_model` and `ebft evaluate --model` all end here.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ebft.data.locate import lasting_name, locate
from ebft.fetch.models import is_gguf
from ebft.models.gguf import check_readable, load_gguf_config, load_gguf_model, load_gguf_tokenizer


def find_model(name: str, key: str) -> str:
    """The lasting name of the model `name`, which `key` held; ModelError where it is not there or cannot be read."""
    locate(name, "model", key)
    found = lasting_name(name)
    check_readable(found)
    return found


def pretrained_config(name: str, **options: Any) -> Any:
    """The transformers configuration of the model `name`; `options` are those of `from_pretrained`."""
    name = lasting_name(name)
    if is_gguf(name):
        return load_gguf_config(name)
    return AutoConfig.from_pretrained(name, **options)


def pretrained_model(name: str, **options: Any) -> PreTrainedModel:
    """The causal language model `name`; `options` are those of `from_pretrained`."""
    name = lasting_name(name)
    if is_gguf(name):
        return load_gguf_model(name, **options)
    return AutoModelForCausalLM.from_pretrained(name, **options)


def pretrained_tokenizer(name: str, **options: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of the model `name`; `options` are those of `from_pretrained`."""
    name = lasting_name(name)
    if is_gguf(name):
        return load_gguf_tokenizer(name)
    return AutoTokenizer.from_pretrained(name, **options)
