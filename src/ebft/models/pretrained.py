"""Loading by name: a folder, a GGUF file, a model of `ebft fetch`, or a Hub id, with the options of `from_pretrained`.

Used for the trainers' `model=`, the config's `base_model` and `ebft evaluate --model`.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ebft.data.locate import lasting_name, locate
from ebft.fetch.catalog import is_gguf
from ebft.models.gguf import check_readable, load_gguf_config, load_gguf_model, load_gguf_tokenizer


def find_model(name: str, key: str) -> str:
    """Absolute path or Hub id of the model `name`, the value of `key`. Raises ModelError if not found or unreadable."""
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
