"""What quantisation with bitsandbytes leaves of the weights that an adapter was trained on."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ebft.errors import ModelError
from ebft.over_transformers import get_keys_to_not_convert

WITHOUT = "Or merge into the weights without quantisation, with adapter=lora load_in_4bit=false load_in_8bit=false."


class BitsAndBytesRounding:
    """Quantises and dequantises the linear layers of `model` that transformers loads in 4 or 8 bits.

    An adapter that was trained on such weights is added to what quantisation leaves of them, so that the merged model
    is the one that was trained. `dtype` is the one that the weights were loaded in. Raises ModelError if bitsandbytes
    does not run on this machine.
    """

    def __init__(self, model: PreTrainedModel, bits: int, dtype: torch.dtype) -> None:
        self._bits, self._dtype = bits, dtype
        self._functional = _bitsandbytes()
        kept = get_keys_to_not_convert(model)
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        self._names = {f"{name}.weight" for name in linear if not any(_is_within(name, other) for other in kept)}
        self(torch.ones(64, 64))  # fails now where the operators do not exist

    def covers(self, name: str) -> bool:
        """Whether a parameter of the model is quantised."""
        return name in self._names

    def __call__(self, weight: Tensor) -> Tensor:
        """The weight after quantisation, in its own dtype."""
        loaded = weight.to(self._dtype)
        try:
            return (self._in_4_bits(loaded) if self._bits == 4 else self._in_8_bits(loaded)).to(weight.dtype)
        except (RuntimeError, NotImplementedError) as error:
            raise ModelError(f"bitsandbytes cannot quantise weights on this machine: {error} {WITHOUT}") from error

    def _in_4_bits(self, weight: Tensor) -> Tensor:
        quantised, state = self._functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        return self._functional.dequantize_4bit(quantised, state)

    def _in_8_bits(self, weight: Tensor) -> Tensor:
        quantised, scale, _ = self._functional.int8_vectorwise_quant(weight.half())
        return self._functional.int8_vectorwise_dequant(quantised, scale)


def _is_within(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}.") or name.endswith(f".{other}")


def _bitsandbytes() -> Any:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError(
            "The adapter was trained on quantised weights, and merging it requires the package bitsandbytes: "
            f"pip install 'ebft[qlora]'. {WITHOUT}"
        )
    from bitsandbytes import functional

    return functional
