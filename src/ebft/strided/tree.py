"""Rollouts of a block as a tree: what several of them begin with is one path, whose tokens are computed once.

A token's states, logits and features depend on the tokens before it alone. Rollouts that begin with the same tokens
have these in common, and the gradient of a common token is the sum of theirs. At a temperature below 1, many do.

M  blocks   N  rollouts per block   R = M * N   G  tokens per rollout   T  tokens of a rollout that a pass reads
C  nodes of a pass: distinct beginnings of the rollouts of a block, ordered by their length and then by block
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Level:
    """The nodes (C,) of one length: last token, block, and step, which is the position of the token in its rollout.

    parent (C,): the node of the level before that each continues, None if all continue the node of the same number.
    node (R,): the node of each rollout.
    """

    tokens: Tensor
    block: Tensor
    step: Tensor
    parent: Tensor | None
    node: Tensor


@dataclass(frozen=True)
class Draws:
    """Where each rollout (R,) draws its next token: from a `row` of logits, as its draw number `column`.

    Rollouts of the same node draw from one row. shape: the numbers of rows and of columns.
    """

    row: Tensor
    column: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, row: Tensor, num_rows: int, num_columns: int | None = None) -> Draws:
        """Number the rollouts of each row, given the row of each rollout (R,), and the most of a row if it is known."""
        order = row.argsort(stable=True)
        first = torch.searchsorted(row[order], torch.arange(num_rows, device=row.device))
        column = torch.empty_like(row)
        column[order] = torch.arange(len(row), device=row.device) - first[row[order]]
        return cls(row, column, (num_rows, int(column.max()) + 1 if num_columns is None else num_columns))

    def spread(self, values: Tensor) -> Tensor:
        """Arrange values (R,) of the rollouts by row and column; columns without a rollout repeat the first one."""
        first = values.new_empty(self.shape[0])
        is_first = self.column == 0
        first[self.row[is_first]] = values[is_first]
        return first.unsqueeze(1).repeat(1, self.shape[1]).index_put_((self.row, self.column), values)

    def collect(self, values: Tensor) -> Tensor:
        """Return the values of the rollouts (R,), from values arranged by row and column."""
        return values.flatten().index_select(0, self.row * values.shape[1] + self.column)


@dataclass(frozen=True)
class Nodes:
    """All nodes (C,) of the first T levels, with the fields of `Level`.

    path (C, T): the node of each token of the beginning; the node itself after its last. of_rollouts (M, N, T): the
    node of each rollout token. With `is_merged` False, each rollout has nodes of its own.
    """

    tokens: Tensor
    block: Tensor
    step: Tensor
    path: Tensor
    of_rollouts: Tensor
    is_merged: bool

    @cached_property
    def by_block(self) -> Tensor:
        """The nodes ordered by block: (C,)."""
        return self.block.argsort(stable=True)

    @cached_property
    def rank(self) -> Tensor:
        """The place of each node in this order: (C,)."""
        rank = torch.empty_like(self.by_block)
        rank[self.by_block] = torch.arange(len(rank), device=rank.device)
        return rank


class RolloutTree:
    """The rollouts of M blocks, token by token. Without `merge`, equal beginnings are separate nodes."""

    def __init__(self, num_blocks: int, num_samples: int, merge: bool, device: torch.device):
        self.num_blocks, self.num_samples, self.merge = num_blocks, num_samples, merge
        self.levels: list[Level] = []
        self._block = torch.arange(num_blocks, device=device).repeat_interleave(num_samples)  # (R,)

    @classmethod
    def of(cls, tokens: Tensor, merge: bool) -> RolloutTree:
        """Return the tree of rollouts (M, N, T)."""
        tree = cls(*tokens.shape[:2], merge, tokens.device)
        for of_step in tokens.unbind(-1):
            tree.grow(of_step.flatten())
        return tree

    def draws(self) -> Draws:
        """Return the draws of the next tokens: from the blocks, or else from the nodes of the last level."""
        return self._draws(len(self.levels))

    def all_draws(self) -> Draws:
        """Return the draws of all levels, (G * R,), from rows [blocks | nodes of all levels but the last]."""
        draws = [self._draws(length) for length in range(len(self.levels))]
        rows = [each.shape[0] for each in draws]
        offsets = [sum(rows[:number]) for number in range(len(rows))]
        return Draws(
            torch.cat([each.row + offset for each, offset in zip(draws, offsets)]),
            torch.cat([each.column for each in draws]),
            (sum(rows), max(each.shape[1] for each in draws)),
        )

    def _draws(self, length: int) -> Draws:
        """Return the draws of the tokens that follow the first `length`."""
        if length == 0:
            return Draws.of(self._block, self.num_blocks, self.num_samples)
        level = self.levels[length - 1]
        return Draws.of(level.node, len(level.tokens), None if self.merge else 1)

    def grow(self, tokens: Tensor) -> Level:
        """Append a token to each rollout, (R,), and return the level of the new nodes."""
        last = self.levels[-1] if self.levels else None
        if self.merge:
            # Sorted by what they continue, and thus by block.
            before = self._block if last is None else last.node
            found, node = torch.unique(before << 32 | tokens, return_inverse=True)
            tokens, parent = found & 0xFFFFFFFF, found >> 32
            block = parent if last is None else last.block[parent]
        else:
            node, parent, block = torch.arange(len(tokens), device=tokens.device), None, self._block
        step = torch.full_like(tokens, len(self.levels))
        self.levels.append(Level(tokens, block, step, None if last is None else parent, node))
        return self.levels[-1]

    def nodes(self, steps: int) -> Nodes:
        """Return the nodes of the first `steps` levels."""
        levels, paths, of_rollouts, offset = self.levels[:steps], [], [], 0
        for step, level in enumerate(levels):
            own = offset + torch.arange(len(level.tokens), device=level.tokens.device)
            path = own.unsqueeze(1).repeat(1, steps)
            if step:
                path[:, :step] = (paths[-1] if level.parent is None else paths[-1][level.parent])[:, :step]
            paths.append(path)
            of_rollouts.append(offset + level.node)
            offset += len(own)
        none = self._block[:0]
        return Nodes(
            torch.cat([none, *(level.tokens for level in levels)]),
            torch.cat([none, *(level.block for level in levels)]),
            torch.cat([none, *(level.step for level in levels)]),
            torch.cat([none.new_empty(0, steps), *paths]),
            torch.stack(of_rollouts, -1).view(-1, self.num_samples, steps) if steps else none.view(0, 0, 0),
            self.merge,
        )
