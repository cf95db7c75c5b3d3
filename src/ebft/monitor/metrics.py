"""Means of what a run logs, exact over micro-batches and ranks: sums of values beside sums of weights."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class MeanMetrics:
    """Collects (sum, weight) pairs by name; `drain` returns the means over all ranks and starts anew."""

    def __init__(self):
        self._sums: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, name: str, total: Tensor | float, weight: Tensor | float) -> None:
        """Add `total`, a sum over `weight` items."""
        device = total.device if isinstance(total, Tensor) else "cpu"
        pair = [torch.as_tensor(x, device=device, dtype=torch.float64).detach() for x in (total, weight)]
        self._sums[name].append(torch.stack(pair))

    def drain(self, accelerator=None) -> dict[str, float]:
        """Weighted means by name since the last call, of names with any weight; all ranks add the same names."""
        means = {}
        device = accelerator.device if accelerator is not None else "cpu"
        for name in sorted(self._sums):
            pair = torch.stack([pair.to(device) for pair in self._sums[name]]).sum(0)
            if accelerator is not None:
                pair = accelerator.reduce(pair, "sum")
            total, weight = pair.tolist()
            if weight:
                means[name] = total / weight
        self._sums.clear()
        return means
