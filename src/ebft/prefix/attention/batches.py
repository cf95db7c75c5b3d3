"""Sequences of different lengths as rows of one length, so that one kernel computes all.

G  sequences    P  tokens of the longest one
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from ebft.prefix.sampling import on_device

Spans = list[tuple[int, int]]  # the (start, end) of every document among the S tokens
T = TypeVar("T")

# How much larger the attention of adjacent sequences may become by padding, if it is computed at once. On CPU, where a
# kernel costs nothing to start, each is computed for itself.
MOST_PADDING = {"cpu": 0.0, "other": 1.5}


def grouped(items: Iterable[T], fit: Callable[[list[T]], bool]) -> list[list[T]]:
    """Return groups of adjacent items: an item joins the group before it if `fit` is true of the longer group."""
    found: list[list[T]] = []
    for item in items:
        if found and fit([*found[-1], item]):
            found[-1].append(item)
        else:
            found.append([item])
    return found


def places_of(lengths: list[int], device: torch.device) -> Tensor | None:
    """Return the place of every token among the G * P of sequences padded at the end; None without padding."""
    longest = max(lengths)
    if min(lengths) == longest:
        return None
    is_token = torch.arange(longest) < torch.tensor(lengths)[:, None]
    return on_device(is_token.flatten().nonzero().squeeze(1), device)


@dataclass(frozen=True, eq=False)
class DocumentBatch:
    """Adjacent documents, at `spans` among the S tokens, that are computed at once."""

    spans: Spans
    device: torch.device

    _kept = cached_property(lambda self: places_of(self.lengths, self.device))

    @cached_property
    def lengths(self) -> list[int]:
        return [end - start for start, end in self.spans]

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def is_padded(self) -> bool:
        return min(self.lengths) < self.longest

    @property
    def tokens(self) -> slice:
        """All tokens from the start of the first document to the end of the last."""
        return slice(self.spans[0][0], self.spans[-1][1])

    @cached_property
    def _index(self) -> Tensor | None:
        """Index among the S tokens of each of the G * P (any token for padding); None if they are adjacent."""
        if not self.is_padded and self.tokens.stop - self.tokens.start == len(self.spans) * self.longest:
            return None
        starts = torch.tensor([start for start, _ in self.spans])
        places = starts[:, None] + torch.arange(self.longest)
        return on_device(places.flatten().clamp_max(self.tokens.stop - 1), self.device)

    @cached_property
    def padding(self) -> Tensor:
        """Whether each place is padding: (G, P) bool."""
        return torch.arange(self.longest, device=self.device) >= on_device(self.lengths, self.device)[:, None]

    def of(self, x: Tensor) -> Tensor:
        """Return x (K, S, ...) of all documents as (K, G, P, ...) of these, with any values after the end of one."""
        if self._index is not None:
            x = x.index_select(1, self._index)
        elif x.shape[1] != len(self.spans) * self.longest:
            x = x[:, self.tokens]
        return x.unflatten(1, (len(self.spans), self.longest))

    def in_order(self, x: Tensor, dim: int) -> Tensor:
        """Return x (..., G, P, ...), with G at `dim`, without padding: (..., tokens, ...)."""
        x = x.flatten(dim, dim + 1)
        return x if self._kept is None else x.index_select(dim, self._kept)
