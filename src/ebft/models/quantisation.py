"""Quantised base weights through bitsandbytes (`load_in_4bit`, `load_in_8bit`)."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch
from transformers import BitsAndBytesConfig

from ebft.errors import ModelError
from ebft.models.precision import weights_dtype

if TYPE_CHECKING:
    from ebft.models.keys import ModelSettings


def quantisation_config(config: ModelSettings) -> BitsAndBytesConfig | None:
    """Settings for 4-bit (NF4, double quantisation) or 8-bit weights, or None without quantisation.

    Raises ModelError if the package bitsandbytes or a CUDA device is missing.
    """
    if not (config.load_in_4bit or config.load_in_8bit):
        return None
    key = "load_in_4bit" if config.load_in_4bit else "load_in_8bit"
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError(f"{key} requires the package bitsandbytes: pip install 'ebft[qlora]'")
    if not torch.cuda.is_available():
        raise ModelError(
            f"{key} requires a CUDA device, but none is available. Remove {key} (and set adapter: lora) to train on "
            "this machine."
        )
    if config.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=weights_dtype(config),
    )
