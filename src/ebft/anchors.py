"""Where the blocks of a document are, shared by data loading, layout and token counts.

A text is a stopped process: it ends at its end token, and so does a rollout. A block exists at an anchor if the text
has not ended there, whatever follows; blocks that required a full reference would be the blocks of texts that go on,
and training on them teaches a model not to end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class BlockOptions:
    """Where the blocks of documents are, what is sampled at each, and how; `ebft.config.options` describes the fields.

    `merge_rollouts` None: on CPU only. `end_ids`: the tokens that end a text and a rollout; empty with `stop_at_end`
    false. `max_length`: the number of tokens at which longer documents were cut, None if none was cut.
    `vocabulary`: ids from this one on are not sampled.
    """

    stride: int
    context_length: int
    generate_max_len: int
    n_samples_per_prompt: int
    min_completion_prefix: int = 0
    merge_rollouts: bool | None = None
    cuda_graphs: bool = False
    end_ids: tuple[int, ...] = ()
    max_length: int | None = None
    vocabulary: int | None = None

    @classmethod
    def of(cls, options: Any, end_ids: Iterable[int], max_length: int | None) -> BlockOptions:
        """Return the options of a trainer's arguments or of a config."""
        return cls(
            stride=options.stride,
            context_length=options.context_length,
            generate_max_len=options.generate_max_len,
            n_samples_per_prompt=options.n_samples_per_prompt,
            min_completion_prefix=options.min_completion_prefix,
            merge_rollouts=options.merge_rollouts,
            cuda_graphs=options.cuda_graphs,
            end_ids=tuple(sorted(end_ids)) if options.stop_at_end else (),
            max_length=max_length,
        )

    def within(self, positions: int | None) -> BlockOptions:
        """Return the options for a model of so many positions, beyond which no rollout may go."""
        limits = [limit for limit in (self.max_length, positions) if limit is not None]
        return replace(self, max_length=min(limits, default=None))


def turn_anchors(start: int, end: int, stop: int, options: BlockOptions) -> range:
    """Return the anchors `a_0 + b * stride` of the turn [start, end), which ends with the token before `stop`.

    `a_0` is `context_length` for text (`start` 0), otherwise after the prompt. Up to `stop` (`start` if the turn has no
    end token), a block exists at every anchor; its reference is shorter where the text ends. After it, and within
    `generate_max_len` tokens of `max_length`, where only texts that end could have a block, a reference is full.
    """
    past_prompt = max(start + options.min_completion_prefix, options.context_length)
    first = past_prompt if start > 0 else options.context_length
    full = end - options.generate_max_len
    ended = stop - 1 if options.max_length is None else min(stop - 1, options.max_length - options.generate_max_len)
    return range(first, max(full, ended if stop > start else full) + 1, options.stride)


def row_anchors(input_ids: Any, turns: Iterable[Sequence[int]], options: BlockOptions) -> list[range]:
    """Return the anchors of each turn, a (start, end) pair of token positions, of a document with `input_ids` (L,)."""
    ends = np.flatnonzero(np.isin(np.asarray(input_ids), options.end_ids)) if options.end_ids else np.empty(0, int)
    anchors = []
    for start, end in turns:
        before = np.searchsorted(ends, end)  # end tokens before the end of the turn
        stop = int(ends[before - 1]) + 1 if before else 0
        anchors.append(turn_anchors(start, end, stop, options))
    return anchors


def count_row_blocks(
    input_ids: Any, prompt_length: int, turns: Sequence[Sequence[int]] | None, options: BlockOptions
) -> int:
    """Return the number of blocks of a document with `input_ids` (L,).

    Blocks are in its `turns`, or if there are none, from `prompt_length` on. Turns are cut at the end of the document.
    """
    length = len(input_ids)
    turns = [(start, min(end, length)) for start, end in turns or [(prompt_length, length)]]
    return sum(map(len, row_anchors(input_ids, turns, options)))
