"""Micro-batches in which the completions of a prompt are adjacent, so that they can share it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROW = "row"  # key of each row's index in the generation batch


def by_group(batches: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """Return the rows of shuffled micro-batches such that the rows of a group are adjacent, with the groups shuffled.

    The groups are ordered by their first rows in `batches`, of which there are as many after as before.
    """
    group = (torch.cat([batch[ROW] for batch in batches]) // size).tolist()
    order = sorted(range(len(group)), key=lambda index: group.index(group[index]))
    per_batch = len(order) // len(batches)
    chunks = [order[start : start + per_batch] for start in range(0, len(order), per_batch)]
    return [{key: _rows_of([batch[key] for batch in batches], chunk) for key in batches[0]} for chunk in chunks]


def _rows_of(parts: list[Any], index: list[int]) -> Any:
    """Return rows of the concatenation of `parts`; scalars and None, which are equal in all parts, as they are."""
    if isinstance(parts[0], list):
        rows = [row for part in parts for row in part]
        return [rows[i] for i in index]
    return torch.cat(parts)[index] if isinstance(parts[0], Tensor) and parts[0].dim() else parts[0]
