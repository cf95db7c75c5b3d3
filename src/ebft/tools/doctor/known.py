"""What is known of GPUs and of published models, so that a step can be planned without either.

Imports nothing heavy, so that the command line can refuse an unknown card at once.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, replace
from typing import Any

from ebft.errors import ConfigError


@dataclass(frozen=True)
class Card:
    """A GPU: GiB of memory that PyTorch sees, and by its data sheet dense FLOP/s in bfloat16 and float32, and bytes/s.
    A card sold with 80 GB has 79.1 to 79.6 GiB: the driver keeps a part."""

    memory: float
    bfloat16: float | None = None
    float32: float | None = None
    bandwidth: float | None = None


CARDS = {
    "rtx4090": Card(23.5, 165e12, 83e12, 1.01e12),
    "a6000": Card(47.5, 155e12, 39e12, 0.77e12),
    "l40s": Card(44.5, 362e12, 92e12, 0.86e12),
    "a100-40": Card(39.4, 312e12, 19.5e12, 1.56e12),
    "a100": Card(79.1, 312e12, 19.5e12, 2.04e12),
    "h100": Card(79.1, 989e12, 67e12, 3.35e12),
    "h200": Card(139.8, 989e12, 67e12, 4.8e12),
    "b200": Card(178, 2250e12, 75e12, 8.0e12),
}

_LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_QWEN = {"model_type": "qwen3_5_text", "max_position_embeddings": 262144}
_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128,
          "max_position_embeddings": 40960, "tie_word_embeddings": True}  # fmt: skip
_QWEN2 = {"model_type": "qwen2", "vocab_size": 151936, "num_key_value_heads": 2,
          "max_position_embeddings": 32768, "tie_word_embeddings": True}  # fmt: skip


def _sizes(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    return {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
            "num_attention_heads": heads}  # fmt: skip


def _llama(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    head = 64 if layers == 16 else 128
    return _LLAMA | _sizes(hidden, intermediate, layers, heads) | {"head_dim": head, "tie_word_embeddings": tied}


# What config.json says of models that may not be reachable; the values that it leaves out are transformers' defaults.
KNOWN: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.2-1B": _llama(2048, 8192, 16, 32, tied=True),
    "meta-llama/Llama-3.2-3B": _llama(3072, 8192, 28, 24, tied=True),
    "meta-llama/Llama-3.1-8B": _llama(4096, 14336, 32, 32, tied=False),
    "Qwen/Qwen2.5-0.5B": _QWEN2 | _sizes(896, 4864, 24, 14),
    "Qwen/Qwen2.5-1.5B": _QWEN2 | _sizes(1536, 8960, 28, 12),
    "Qwen/Qwen3-0.6B": _QWEN3 | _sizes(1024, 3072, 28, 16),
    "Qwen/Qwen3-4B": _QWEN3 | _sizes(2560, 9728, 36, 32),
    "Qwen/Qwen3.5-4B": _QWEN | {"hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True},
    "Qwen/Qwen3.5-9B": _QWEN | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
}


def gpu_card(name: str | None, memory: str | None) -> tuple[str, Card]:
    """The card of `--for`, with the memory of `--memory` if that is given; the rates of one without a name are not
    known. Raises ConfigError."""
    if name is not None and memory is None:
        return name, CARDS[name]
    parsed = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|GB|G)?", str(memory).strip(), re.IGNORECASE)
    size = float(parsed[1]) if parsed else 0.0
    if parsed and (parsed[2] or "").lower() == "gb":
        size *= 1e9 / 2**30
    if not 0 < size < 10_000:
        raise ConfigError(f"--memory {memory}: expected the memory of a card, such as 24GiB, or 80GB (80e9 bytes).")
    return f"{name or 'a card'} with {size:.4g} GiB", replace(CARDS.get(name or "", Card(0)), memory=size)


@dataclass
class Use:
    """What a phase needs: bytes on the device that trains and on the others, and what one optimizer step computes."""

    peak: int = 0
    elsewhere: int = 0
    kernels: float = 0
    flops: float = 0  # on the device that trains
    moved: float = 0  # bytes that its kernels read and write
    flops_elsewhere: float = 0


def process_for_plans() -> None:
    """Let this process be for plans (plan.py), before it imports anything heavy: without GPUs, launchers and output."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"):
        os.environ.pop(name, None)
    os.environ |= {
        "ACCELERATE_TORCH_DEVICE": "pretend:0",
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
    }
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
