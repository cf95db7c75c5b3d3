"""Where the blocks of a document are, shared by data loading, layout and token counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockOptions:
    """Where the blocks of documents are, what is sampled at each, and how; `ebft.config.options` describes the fields.

    `merge_rollouts` None: on CPU only.
    """

    stride: int
    context_length: int
    generate_max_len: int
    n_samples_per_prompt: int
    min_completion_prefix: int = 0
    merge_rollouts: bool | None = None

    @classmethod
    def of(cls, options: Any) -> BlockOptions:
        """Return those of a trainer's arguments or of a config."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})


def first_anchor(prompt_length, context_length: int, min_completion_prefix: int = 0):
    """Return the first anchor a_0 of a row: `context_length` for text (`prompt_length` 0), otherwise after the prompt.

    `prompt_length` is an int or a long tensor of any shape; the result has the same type and shape.
    """
    if isinstance(prompt_length, Tensor):
        past_prompt = (prompt_length + min_completion_prefix).clamp_min(context_length)
        return torch.where(prompt_length > 0, past_prompt, context_length)
    return max(prompt_length + min_completion_prefix, context_length) if prompt_length > 0 else context_length


def count_blocks(length, first, stride: int, generate_max_len: int):
    """Return the number of anchors `first + b * stride` that are followed by a full reference block.

    `length` and `first` are ints or long tensors; the result has the same type.
    """
    room = length - generate_max_len - first
    if isinstance(room, Tensor):
        return torch.where(room >= 0, room.div(stride, rounding_mode="floor") + 1, 0)
    return room // stride + 1 if room >= 0 else 0


def count_row_blocks(length: int, prompt_length: int, turns: Sequence[Sequence[int]] | None, options: Any) -> int:
    """Return the number of blocks of a row that is cut at `length` tokens, with the `options` of the blocks.

    Blocks are in its `turns`, (start, end) pairs of token positions, or if there are none, from `prompt_length` on.
    """
    counts = (
        count_blocks(
            min(end, length),
            first_anchor(start, options.context_length, options.min_completion_prefix),
            options.stride,
            options.generate_max_len,
        )
        for start, end in turns or [(prompt_length, length)]
    )
    return int(sum(counts))
