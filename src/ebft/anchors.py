"""Where the blocks of a document may start: the one rule that data, layout and token counts share."""

from __future__ import annotations

import torch
from torch import Tensor


def first_anchor(prompt_length, context_length: int, min_completion_prefix: int = 0):
    """The first anchor a_0 of a row: `context_length` for text (`prompt_length` 0), else past the prompt.

    Takes an int or a long tensor of any shape, and returns the same.
    """
    if isinstance(prompt_length, Tensor):
        past_prompt = (prompt_length + min_completion_prefix).clamp_min(context_length)
        return torch.where(prompt_length > 0, past_prompt, context_length)
    return max(prompt_length + min_completion_prefix, context_length) if prompt_length > 0 else context_length


def count_blocks(length, first, stride: int, generate_max_len: int):
    """How many anchors `first + b * stride` leave room for a whole reference block; ints or long tensors."""
    room = length - generate_max_len - first
    if isinstance(room, Tensor):
        return torch.where(room >= 0, room.div(stride, rounding_mode="floor") + 1, 0)
    return room // stride + 1 if room >= 0 else 0
