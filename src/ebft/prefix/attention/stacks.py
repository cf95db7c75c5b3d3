"""Batching of several small attention tiles into one, so that they share the calls of matrix products and softmax.

Short documents yield tiles of a few thousand scores, for which launching a kernel takes longer than running it.

    K  key/value heads    D  tiles of a stack    R  rows of the longest    W  shared keys of the widest    X  features
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ebft.prefix.attention.tiles import Tile

# Maximum number of scores of a stack, which fit in the processor's cache.
_SCORES = 2**18
# Maximum ratio of the scores of a stack, including padding, to those of its tiles.
_MOST_PADDING = 1.5


@dataclass(frozen=True)
class Stack:
    """Adjacent tiles, padded to the longest. Has the interface of `Tile`, with K * D in place of K.

    Padding rows are zeros that attend to everything, and their results are discarded. All other rows mask padding keys.
    """

    rows: slice
    width: int
    row_index: Tensor  # (D, R)
    is_padding: Tensor | None  # (D, R); None if all tiles have R rows
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
        """Return the rows (K * D, R, X) of x (K, rows, X)."""
        taken = x[:, self.row_index]
        if self.is_padding is not None:
            taken.masked_fill_(self.is_padding.unsqueeze(-1), 0)
        return taken.flatten(0, 1)

    def in_order(self, stacked: Tensor) -> Tensor:
        """Convert stacked rows (K * D, R, X) to consecutive rows (K, rows, X), without padding."""
        rows = stacked.unflatten(0, (-1, len(self.row_index)))
        return rows.flatten(1, 2) if self.is_padding is None else rows[:, ~self.is_padding]

    def take_keys(self, x: Tensor, after: int = 0) -> Tensor:
        """Return the shared keys of x (K, keys, X) and the `after` keys that follow them: (K * D, W + after, X)."""
        index = self.key_start[:, None] + torch.arange(self.width + after, device=x.device)
        return x[:, index.clamp_max(x.shape[1] - 1)].flatten(0, 1)

    def put(self, output: Tensor, weights: Tensor, keys: Tensor) -> None:
        """Write the products of weights (K * D, R, W) and the tiles' part of keys (K, keys, X) to their rows."""
        output[:, self.rows] = self.in_order(weights @ self.take_keys(keys))

    def add_to_keys(self, total: Tensor, weights: Tensor, rows: Tensor) -> None:
        """Add the products of the transposed weights (K * D, R, W) and the tiles' rows to their part of total."""
        index = self.key_start[:, None] + torch.arange(self.width, device=total.device)
        added = (weights.mT @ self.take_rows(rows)).unflatten(0, (-1, len(index))).flatten(1, 2)
        total.index_add_(1, index.clamp_max(total.shape[1] - 1).flatten(), added.to(total.dtype))

    def hide(self, shared: Tensor) -> None:
        """Set the scores (K * D, R, W) of masked keys to minus infinity, in place."""
        shared.unflatten(0, (-1, len(self.hidden))).masked_fill_(self.hidden, float("-inf"))

    def hide_own(self, own: Tensor, hidden: Tensor) -> None:
        """Set the scores (K * D, R, U) of own keys masked by `hidden` (rows, U) to minus infinity, in place."""
        of_rows = hidden[self.row_index]
        if self.is_padding is not None:
            of_rows.masked_fill_(self.is_padding.unsqueeze(-1), False)
        own.unflatten(0, (-1, len(of_rows))).masked_fill_(of_rows, float("-inf"))


def stack_up(tiles: list[Tile], key_heads: int | None) -> list[Tile | Stack]:
    """Combine adjacent tiles into stacks that are small and contain little padding, keeping the order.

    With `key_heads` None, the tiles are returned unchanged.
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
