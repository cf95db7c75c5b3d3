"""Fused experts in 4 bits: bitsandbytes quantises linear layers, and most experts are stacked parameters.

A weight (E, O, I), of E experts, is stored as bytes (E, O, I / 2), and dequantised while its module runs. With gradient
checkpointing, one layer's experts are dequantised at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import ParamWrapper
from torch import Tensor, nn

PACKED = torch.uint8


def quantise_experts(model: nn.Module, **options: Any) -> int:
    """Quantise the frozen fused experts of a model in place, with `options` of `quantize_4bit`; return their number. To
    be called with the adapter attached: PEFT takes the shapes of experts when it adapts them."""
    from bitsandbytes.functional import quantize_4bit

    # PEFT adds to a parameter before its module runs, in wrappers around it; the outermost is first.
    outermost: dict[int, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, ParamWrapper):
            outermost.setdefault(id(module.get_base_layer()), module)
    count = 0
    for module in list(model.modules()):
        states = {}
        for name, weight in list(module.named_parameters(recurse=False)):
            stacks_experts = weight.dim() == 3 and weight.is_floating_point() and not isinstance(module, nn.Conv1d)
            if not stacks_experts or weight.requires_grad or weight.shape[-1] % 2:
                continue
            packed, states[name] = quantize_4bit(weight.data, **options)
            _replace(module, name, packed.view(*weight.shape[:-1], -1))
        if states:
            around = outermost.get(id(module), module)
            around.register_forward_pre_hook(partial(_dequantise, module, states))
            around.register_forward_hook(partial(_restore, module, states), always_call=True)
            count += len(states)
    return count


def quantises(model: nn.Module) -> bool:
    """Whether transformers has quantised the linear layers of a model to 4 bits."""
    return getattr(model, "is_loaded_in_4bit", False)  # absent in others


def unpacked_size(weight: Tensor) -> int:
    """The number of elements that a weight stands for."""
    return weight.nbytes * 2 if is_packed(weight) else weight.numel()


def is_packed(weight: Tensor) -> bool:
    """Whether a weight has 4 bits per element, two in each byte."""
    return type(weight).__name__ == "Params4bit" or weight.dtype == PACKED


def _dequantise(module: nn.Module, states: Mapping[str, Any], *call: Any) -> None:
    from bitsandbytes.functional import dequantize_4bit

    for name, state in states.items():
        packed = getattr(module, name).data
        if state.absmax.device != packed.device:
            state.to(packed.device)
        state.packed = packed
        _replace(module, name, dequantize_4bit(packed.view(-1, 1), state))


def _restore(module: nn.Module, states: Mapping[str, Any], *call: Any) -> None:
    for name, state in states.items():
        if getattr(module, name).dtype != PACKED:  # the pre-hook may have failed
            _replace(module, name, state.packed)


def _replace(module: nn.Module, name: str, value: Tensor) -> None:
    setattr(module, name, nn.Parameter(value, requires_grad=False))
