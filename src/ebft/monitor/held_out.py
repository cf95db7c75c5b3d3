"""Held-out means of a trainer's evaluation loop: every row once, whatever the batch size and the number of processes.

B  rows of this process's batch
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HeldOutMeans:
    """Weighted means of values by name over one evaluation of `rows` rows (None: as many as come).

    Loaders repeat the first rows to fill the last batch of every process; in the order of all processes these come
    last, and are left out.
    """

    def __init__(self, accelerator: Any, rows: int | None) -> None:
        self._accelerator, self._left = accelerator, rows
        self._sums: dict[str, list[float]] = {}

    def add(self, values: dict[str, Tensor], weights: Tensor) -> None:
        """Values (B,) of this process's rows, of which each counts `weights` (B,); all processes add the same names."""
        table = torch.stack([*values.values(), weights.to(values[next(iter(values))])], dim=-1)
        table = self._accelerator.gather(table.to(self._accelerator.device)).double()[: self._left]
        if self._left is not None:
            self._left -= len(table)
        for column, name in enumerate(values):
            total, weight = self._sums.setdefault(name, [0.0, 0.0])
            self._sums[name] = [
                total + (table[:, column] * table[:, -1]).sum().item(),
                weight + table[:, -1].sum().item(),
            ]

    def means(self) -> dict[str, float]:
        """The means of all names with any weight."""
        return {name: total / weight for name, (total, weight) in self._sums.items() if weight}
