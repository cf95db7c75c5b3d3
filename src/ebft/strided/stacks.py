"""Several small pieces of attention as one: the same products and softmax with a document more instead of a call more.

Short documents make pieces of a few thousand scores, whose kernels take less time than it takes to call them.

    K  key/value heads    D  pieces of a stack    R  rows of the longest    W  shared keys of the widest    X  features
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ebft.strided.pieces import Piece

# Scores of a stack at most: what stays in a processor's cache.
_SCORES = 2**18
# Scores of a stack, with those that pad it, to those of its pieces.
_MOST_PADDING = 1.5


@dataclass(frozen=True)
class Stack:
    """Neighbouring pieces, padded to the longest: used like a `Piece`, with K * D in the place of K.

    Padding rows are zeros that see everything, and what becomes of them is dropped; padding keys are seen by none else.
    """

    rows: slice
    width: int
    row_index: Tensor  # (D, R)
    is_padding: Tensor | None  # (D, R); None where all pieces have R rows
    key_start: Tensor  # (D,)
    hidden: Tensor  # (D, R, W)

    @classmethod
    def of(cls, pieces: list[Piece]) -> Stack:
        device = pieces[0].hidden.device
        counts = torch.tensor([_rows(piece) for piece in pieces], device=device)
        row = torch.arange(int(counts.max()), device=device)
        is_padding = row >= counts[:, None]
        starts = torch.tensor([piece.rows.start for piece in pieces], device=device)
        row_index = starts[:, None] + torch.where(is_padding, 0, row)
        hidden = torch.zeros(len(pieces), len(row), max(_width(piece) for piece in pieces), dtype=torch.bool)
        hidden = hidden.to(device)
        for of_piece, piece in zip(hidden, pieces):
            rows, width = _rows(piece), _width(piece)
            of_piece[:rows, width - piece.hidden.shape[1] : width] = piece.hidden
            of_piece[:rows, width:] = True
        return cls(
            slice(pieces[0].rows.start, pieces[-1].rows.stop),
            hidden.shape[2],
            row_index,
            is_padding if is_padding.any() else None,
            torch.tensor([piece.keys.start for piece in pieces], device=device),
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

    def take_keys(self, x: Tensor, behind: int = 0) -> Tensor:
        """The shared keys (K * D, W + behind, X) of x (K, keys, X), with so many of those behind them."""
        index = self.key_start[:, None] + torch.arange(self.width + behind, device=x.device)
        return x[:, index.clamp_max(x.shape[1] - 1)].flatten(0, 1)

    def put(self, output: Tensor, weights: Tensor, keys: Tensor) -> None:
        """Write the products of weights (K * D, R, W) with the piece's part of keys (K, keys, X) to its rows."""
        output[:, self.rows] = self.in_order(weights @ self.take_keys(keys))

    def add_to_keys(self, total: Tensor, weights: Tensor, rows: Tensor) -> None:
        """Add the products of weights (K * D, R, W), transposed, with the piece's rows to its part of total."""
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


def stack_up(pieces: list[Piece], key_heads: int | None) -> list[Piece | Stack]:
    """The pieces in order, neighbours in one stack as long as it stays small and little of it is padding.

    None for `key_heads` leaves all of them apart.
    """
    if key_heads is None:
        return pieces
    stacked: list[Piece | Stack] = []
    group: list[Piece] = []
    for piece in pieces:
        if group and not _fits([*group, piece], key_heads):
            stacked.append(Stack.of(group) if len(group) > 1 else group[0])
            group = []
        group.append(piece)
    return [*stacked, Stack.of(group) if len(group) > 1 else group[0]]


def _fits(pieces: list[Piece], key_heads: int) -> bool:
    padded = len(pieces) * max(_rows(piece) for piece in pieces) * max(_width(piece) for piece in pieces)
    return key_heads * padded <= _SCORES and padded <= _MOST_PADDING * sum(_rows(p) * _width(p) for p in pieces)


def _rows(piece: Piece) -> int:
    return piece.rows.stop - piece.rows.start


def _width(piece: Piece) -> int:
    return piece.keys.stop - piece.keys.start
