"""Checks of the values in a model's config.json, which transformers reports without the file or the key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ebft.errors import ModelError

# Sizes with their least values. Models without layers are refused when they are loaded.
_SIZES = {
    "vocab_size": 1,
    "hidden_size": 1,
    "num_hidden_layers": 0,
    "num_attention_heads": 1,
    "max_position_embeddings": 1,
    "num_key_value_heads": 1,
}
_DROPOUT = re.compile(r"(.*_)?(dropout|pdrop|layerdrop)(_rate|_prob|_p)?")  # keys with a probability
_QUANTISATIONS = {"quant_method", "load_in_4bit", "load_in_8bit"}
_ROPE_NUMBERS = (
    *("rope_theta", "factor", "partial_rotary_factor", "attention_factor", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
)
_DIVISORS = ("rope_theta", "factor")  # which are not 0


def check_model_config(values: Mapping[str, Any], path: Path, key: str) -> None:
    """Raise ModelError for sizes and dtypes in the config.json at `path` that no model has; `key` is the config key.

    Some models have one size per layer, and models of several parts have their sizes in sections; both are left to
    transformers.
    """
    for name, least in _SIZES.items():
        value = values.get(name, least)
        is_default = value is None and ("text_config" in values or name == "num_key_value_heads")
        if isinstance(value, list) or is_default:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ModelError(
                f"{key}: {path}: {name}: invalid value {value!r:.60}; expected an integer of at least {least}."
            )
    for name in ("dtype", "torch_dtype"):
        value = values.get(name)
        if isinstance(value, str) and value != "auto" and not _is_dtype(value, values):
            raise ModelError(f"{key}: {path}: {name}: invalid value {value!r:.60}; expected a dtype such as bfloat16.")
    for section in (values, values.get("text_config")):
        _check_rope(section if isinstance(section, dict) else {}, path, key)
        for name, value in section.items() if isinstance(section, Mapping) else ():
            if _DROPOUT.fullmatch(name) and isinstance(value, int | float) and not 0 <= value < 1 and value is not True:
                raise ModelError(
                    f"{key}: {path}: {name}: invalid value {value!r:.60}; expected a number from 0 to less than 1."
                )
    quantised = values.get("quantization_config", {"quant_method": ""})
    if quantised is not None and not (isinstance(quantised, dict) and quantised.keys() & _QUANTISATIONS):
        raise ModelError(
            f"{key}: {path}: quantization_config: invalid value {quantised!r:.60}; expected an object with a "
            "quant_method. Remove it if the weights are not quantised."
        )


def key_with(value: Any, values: Mapping[str, Any]) -> str | None:
    """The key, with those of its sections, that has a value in the content of a config.json; None if none has."""
    return next(_keys_with(value, values, ""), None)


def _keys_with(value: Any, values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, found in values.items():
        if isinstance(found, Mapping):
            yield from _keys_with(value, found, f"{prefix}{name}.")
        elif found == value:
            yield f"{prefix}{name}"


def _check_rope(values: Mapping[str, Any], path: Path, key: str) -> None:
    """Raise ModelError for a number of the rotary embedding that is a text, negative, or 0 where it divides.

    Some models have one set of them per kind of layer, and some a list with one number per layer.
    """
    sections = [("", {"rope_theta": values.get("rope_theta")})]
    sections += [(f"{name}.", values.get(name)) for name in ("rope_parameters", "rope_scaling")]
    for prefix, section in sections:
        for name, value in section.items() if isinstance(section, dict) else ():
            if isinstance(value, dict):
                sections.append((f"{prefix}{name}.", value))
            elif name in _ROPE_NUMBERS and (isinstance(value, str) or _is_negative(value, name in _DIVISORS)):
                raise ModelError(
                    f"{key}: {path}: {prefix}{name}: invalid value {value!r:.60}; expected a positive number."
                )


def _is_negative(value: Any, or_zero: bool) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (not value >= 0 or (or_zero and value == 0))  # true for NaN


def _is_dtype(name: str, values: Mapping[str, Any]) -> bool:
    found = getattr(torch, name.removeprefix("torch."), None)
    return isinstance(found, torch.dtype) and (found.is_floating_point or "quantization_config" in values)
