"""Checks of the values in a model's config.json, which transformers reports without the file or the key."""

from __future__ import annotations

from collections.abc import Mapping
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
}


def check_model_config(values: Mapping[str, Any], path: Path, key: str) -> None:
    """Raise ModelError for sizes and dtypes in the config.json at `path` that no model has; `key` is the config key.

    Some models have one size per layer, and models of several parts have their sizes in sections; both are left to
    transformers.
    """
    for name, least in _SIZES.items():
        value = values.get(name, least)
        if isinstance(value, list) or (value is None and "text_config" in values):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ModelError(
                f"{key}: {path}: {name}: invalid value {value!r:.60}; expected an integer of at least {least}."
            )
    for name in ("dtype", "torch_dtype"):
        value = values.get(name)
        if isinstance(value, str) and value != "auto" and not _is_dtype(value):
            raise ModelError(f"{key}: {path}: {name}: invalid value {value!r:.60}; expected a dtype such as bfloat16.")


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name.removeprefix("torch."), None), torch.dtype)
