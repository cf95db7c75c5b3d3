"""Held-out means of structured mode: every row once, whatever the batch size and the number of processes.

B  rows of this process's batch, N  samples of a group, M  groups, D  feature dimension
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ebft.rewards import alignment_rewards, cfm_loss, diversity_rewards, unbiased_cfm_loss, whiten
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


def held_out_values(match: FeatureMatch) -> dict[str, Tensor]:
    """Feature matching of every group, repeated for its samples (M * N,), in the one space that models compare in:

    normalised and unwhitened, as in strided mode (`cfm_loss_whitened` apart).
    """
    phi, phi_ref = match.samples, match.reference
    values = {
        "alignment": alignment_rewards(phi, phi_ref).mean(-1),
        "diversity": diversity_rewards(phi).mean(-1),
        "cfm_loss_plugin": cfm_loss(phi, phi_ref),
        "cfm_loss_whitened": cfm_loss(*whiten(phi, phi_ref)),
    }
    if phi.shape[1] > 1:
        values["cfm_loss"] = unbiased_cfm_loss(phi, phi_ref)
    return {name: value.repeat_interleave(phi.shape[1]) for name, value in values.items()}
