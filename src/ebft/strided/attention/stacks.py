"""Several small tiles of attention as one: the same products and softmax with a document more instead of a call more.

Short documents make tiles of a few thousand scores, whose kernels take less time than it takes to call them.

    K  key/value heads    D  tiles of a stack    R  rows of the longest    W  shared keys of the widest    X  features
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ebft.strided.attention.tiles import Tile

# Scores of a stack at most: what stays in a processor's cache.
_SCORES = 2**18
# Scores of a stack, with those that pad it, to those of its tiles.
_MOST_PADDING = 1.5


@dataclass(frozen=True)
class Stack:
    """Neighbouring tiles, padded to the longest: used like a `Tile`, with K * D in the place of K.

    Padding rows are zeros that see everything, and what becomes of them is dropped; padding keys are seen by none else.
    """

    rows: slice
    width: int
    row_index: Tensor  # (D, R)
    is_padding: Tensor | None  # (D, R); None where all tiles have R rows
    key_start: Tensor  # (D,)
    hidden: Tensor  # (D, R, W)

    @classmethod
    def of(cls, tiles: list[Tile]) -> Stack:
        device = tiles[0].hidden.device
        counts = torch.tensor([_rows(tile) for tile in tiles], device=device)
        row = torch.arange(int(counts.max()), device=device)
        is_padding = row >= counts[:, None]
        starts = torch.tensor([tile.rows.start for tile in tiles], device=device)
        row_index = starts[:, None] + torch.where(is_padding, 0, row)
        hidden = torch.zeros(len(tiles), len(row), max(_width(tile) for tile in tiles), dtype=torch.bool)
        hidden = hidden.to(device)
        for of_tile, tile in zip(hidden, tiles):
            rows, width = _rows(tile), _width(tile)
            of_tile[:rows, width - tile.hidden.shape[1] : width] = tile.hidden
            of_tile[:rows, width:] = True
        return cls(
            slice(tiles[0].rows.start, tiles[-1].rows.stop),
            hidden.shape[2],
            row_index,
            is_padding if is_padding.any() else None,
            torch.tensor([tile.keys.start for tile in tiles], device=device),
            hidden,
        )

    def take_rows(self, x: Tensor) -> Tensor:
        """The rows (K * D, R, X) of x (K, rows, X)."""
        taken = x[:, self.row_index]
        if self.is_padding is not None:
            taken.masked_fill_(self.is_padding.unsqueeze(-1), 0)
        return taken.flatten(0, 1)

    def in_order(self, stacked: Tensor) -> Tensor:
        """The same rows one after the other, (K, rows, X), from (K * D, R, X)."""
        rows = stacked.unflatten(0, (-1, len(self.row_index)))
        return rows.flatten(1, 2) if self.is_padding is None else rows[:, ~self.is_padding]

    def take_keys(self, x: Tensor, after: int = 0) -> Tensor:
        """The shared keys (K * D, W + after, X) of x (K, keys, X), with so many of those after them."""
        index = self.key_start[:, None] + torch.arange(self.width + after, device=x.device)
        return x[:, index.clamp_max(x.shape[1] - 1)].flatten(0, 1)

    def put(self, output: Tensor, weights: Tensor, keys: Tensor) -> None:
        """Write the products of weights (K * D, R, W) with the tile's part of keys (K, keys, X) to its rows."""
        output[:, self.rows] = self.in_order(weights @ self.take_keys(keys))

    def add_to_keys(self, total: Tensor, weights: Tensor, rows: Tensor) -> None:
        """Add the products of weights (K * D, R, W), transposed, with the tile's rows to its part of total."""
        index = self.key_start[:, None] + torch.arange(self.width, device=total.device)
        added = (weights.mT @ self.take_rows(rows)).unflatten(0, (-1, len(index))).flatten(1, 2)
        total.index_add_(1, index.clamp_max(total.shape[1] - 1).flatten(), added.to(total.dtype))

    def hide(self, shared: Tensor) -> None:
        """Set scores (K * D, R, W) of what a row must not see to minus infinity."""
        shared.unflatten(0, (-1, len(self.hidden))).masked_fill_(self.hidden, float("-inf"))

    def hide_own(self, own: Tensor, hidden: Tensor) -> None:
        """The same for scores of own keys (K * D, R, U), by hidden (rows, U)."""
        of_rows = hidden[self.row_index]
        if self.is_padding is not None:
            of_rows.masked_fill_(self.is_padding.unsqueeze(-1), False)
        own.unflatten(0, (-1, len(of_rows))).masked_fill_(of_rows, float("-inf"))


def stack_up(tiles: list[Tile], key_heads: int | None) -> list[Tile | Stack]:
    """The tiles in order, neighbours in one stack as long as it stays small and little of it is padding.

    None for `key_heads` leaves all of them apart.
    """
    if key_heads is None:
        return tiles
    stacked: list[Tile | Stack] = []
    group: list[Tile] = []
    for tile in tiles:
        if group and not _fits([*group, tile], key_heads):
            stacked.append(Stack.of(group) if len(group) > 1 else group[0])
            group = []
        group.append(tile)
    return [*stacked, Stack.of(group) if len(group) > 1 else group[0]]


def _fits(tiles: list[Tile], key_heads: int) -> bool:
    padded = len(tiles) * max(_rows(tile) for tile in tiles) * max(_width(tile) for tile in tiles)
    return key_heads * padded <= _SCORES and padded <= _MOST_PADDING * sum(_rows(p) * _width(p) for p in tiles)


def _rows(tile: Tile) -> int:
    return tile.rows.stop - tile.rows.start


def _width(tile: Tile) -> int:
    return tile.keys.stop - tile.keys.start
