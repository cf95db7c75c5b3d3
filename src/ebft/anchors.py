"""Where the blocks of a document are, shared by data loading, layout and token counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any


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


def turn_anchors(start: int, end: int, options: Any) -> range:
    """Return the anchors `a_0 + b * stride` of a turn, each followed by a full reference block before its `end`.

    `a_0` is `context_length` for text (`start` 0), otherwise after the prompt. `options`: those of the blocks.
    """
    past_prompt = max(start + options.min_completion_prefix, options.context_length)
    first = past_prompt if start > 0 else options.context_length
    return range(first, end - options.generate_max_len + 1, options.stride)


def count_row_blocks(length: int, prompt_length: int, turns: Sequence[Sequence[int]] | None, options: Any) -> int:
    """Return the number of blocks of a row that is cut at `length` tokens, with the `options` of the blocks.

    Blocks are in its `turns`, (start, end) pairs of token positions, or if there are none, from `prompt_length` on.
    """
    return sum(len(turn_anchors(start, min(end, length), options)) for start, end in turns or [(prompt_length, length)])
