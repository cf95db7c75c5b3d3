"""Which type the loaded weights have."""

from typing import Any

import torch


def weights_dtype(config: Any) -> torch.dtype:
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
