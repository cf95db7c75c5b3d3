"""Which type the loaded weights have."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig

# Least share of 16-bit weights that a step must change. A smaller one is most of a run's movement lost.
ENOUGH = 0.25


def weights_dtype(config: RunConfig) -> torch.dtype:
    """The type that `torch_dtype` names; else what `bf16` asks for; else float32.

    `bf16: auto` means bfloat16 where the GPU computes in it. `fp16` is mixed precision: its weights stay float32,
    since float16 gradients cannot be unscaled.
    """
    if config.torch_dtype is not None:
        return getattr(torch, config.torch_dtype)
    if config.bf16 is True or (config.bf16 == "auto" and _gpu_has_bf16()):
        return torch.bfloat16
    return torch.float32


def _gpu_has_bf16() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported()


def warn_of_lost_steps(model: nn.Module, learning_rate: float) -> None:
    """Warn where trained 16-bit weights are too coarse for steps of the learning rate, which is about Adam's step.

    A weight w in bfloat16 has 8 significant bits: what changes it by less than |w| / 512 is rounded away.
    """
    share = share_that_moves(model, learning_rate)
    if share is not None and share < ENOUGH:
        warnings.warn(
            f"learning_rate: {learning_rate:g} is small for weights of 16 bits: a step of that size changes "
            f"{share:.1%} of them, and the others round back to what they were. Set torch_dtype: float32, which keeps "
            "small steps, or adapter: lora, whose weights are float32.",
            stacklevel=2,
        )


@torch.no_grad()
def share_that_moves(model: nn.Module, step: float) -> float | None:
    """The share of the trained 16-bit weights that differ after a change by `step`; None where there are none."""
    moved = total = 0
    for weight in model.parameters():
        if weight.requires_grad and weight.dtype in (torch.bfloat16, torch.float16) and not weight.is_meta:
            some = weight.flatten()[: 2**16]  # of each: enough for a share, and cheap for any model
            moved += int((some.float() + step).to(some.dtype).ne(some).sum())
            total += some.numel()
    return moved / total if total else None
