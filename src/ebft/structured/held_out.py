"""Held-out means of structured mode: every row once, whatever the batch size and the number of processes.

B  rows of this process's batch, N  samples of a group, M  groups, D  feature dimension
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ebft.config.options import RewardOptions
from ebft.scores import feature_scores
from ebft.structured.reward import FeatureMatch


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


def held_out_values(match: FeatureMatch, options: RewardOptions) -> dict[str, Tensor]:
    """Feature matching of every group, repeated for its samples (M * N,), in the one space that models compare in:

    normalised and unwhitened, as in strided mode (`ebft.scores.feature_scores`).
    """
    n = match.samples.shape[1]
    values = feature_scores(
        match.samples,
        match.reference,
        alignment_coef=options.alignment_coef,
        diversity_coef=options.diversity_coef,
        pass_at=sorted({1, n}),
    )
    return {name: value.repeat_interleave(n) for name, value in values.items()}
