"""The dtype of the loaded weights."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from ebft.models.keys import ModelSettings

# Minimum fraction of 16-bit weights that a step should change. Below it, most updates are lost to rounding.
ENOUGH = 0.25


def weights_dtype(config: ModelSettings) -> torch.dtype:
    """The dtype set by `torch_dtype`, otherwise by `bf16`, otherwise float32.

    `bf16: auto` means bfloat16 if the GPU supports it. `fp16` is mixed precision: its weights stay float32, since
    float16 gradients cannot be unscaled.
    """
    if config.torch_dtype is not None:
        return getattr(torch, config.torch_dtype)
    if config.bf16 is True or (config.bf16 == "auto" and _gpu_has_bf16()):
        return torch.bfloat16
    return torch.float32


def _gpu_has_bf16() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported()


def warn_of_lost_steps(model: nn.Module, learning_rate: float) -> None:
    """Warn if trained 16-bit weights are too coarse for updates of the size of the learning rate, as Adam's are.

    A weight w in bfloat16 has 8 significant bits: changes smaller than |w| / 512 are lost to rounding.
    """
    share = share_that_moves(model, learning_rate)
    if share is not None and share < ENOUGH:
        warnings.warn(
            f"learning_rate: {learning_rate:g} is too small for 16-bit weights: an update of that size changes "
            f"{share:.1%} of them, and the others are rounded back to their old values. Set torch_dtype: float32, "
            "which preserves small updates, or adapter: lora, whose weights are float32.",
            stacklevel=2,
        )


@torch.no_grad()
def share_that_moves(model: nn.Module, step: float) -> float | None:
    """The fraction of the trained 16-bit weights that change when `step` is added; None if there are none."""
    moved = total = 0
    for weight in model.parameters():
        if weight.requires_grad and weight.dtype in (torch.bfloat16, torch.float16) and not weight.is_meta:
            some = weight.flatten()[: 2**16]  # a sample of each: enough for an estimate, and fast for any model
            moved += int((some.float() + step).to(some.dtype).ne(some).sum())
            total += some.numel()
    return moved / total if total else None
