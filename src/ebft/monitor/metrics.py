"""Means of logged metrics from sums of values and weights, exact over micro-batches and ranks."""

from __future__ import annotations

import resource
import sys
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor


class MeanMetrics:
    """Accumulates (sum, weight) pairs by name; `drain` returns the means over all ranks and resets."""

    def __init__(self):
        self._sums: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, name: str, total: Tensor | float, weight: Tensor | float) -> None:
        """Add `total`, a sum over `weight` items."""
        device = total.device if isinstance(total, Tensor) else "cpu"
        pair = [torch.as_tensor(x, device=device, dtype=torch.float64).detach() for x in (total, weight)]
        self._sums[name].append(torch.stack(pair))

    def drain(self, accelerator=None) -> dict[str, float]:
        """Return the weighted means since the last call, by name, for names with non-zero weight.

        All ranks must add the same names.
        """
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

    def state(self) -> dict[str, list[Tensor]]:
        """Return what was added since the last `drain`, for `restore`."""
        return {name: list(pairs) for name, pairs in self._sums.items()}

    def restore(self, state: dict[str, list[Tensor]]) -> None:
        """Continue from a result of `state`."""
        self._sums.clear()
        self._sums.update({name: list(pairs) for name, pairs in state.items()})


class HeldOutMeans:
    """Weighted means of values by name over one evaluation of `rows` rows (None: no limit).

    Data loaders repeat the first rows to fill the last batch of every process. In gathered order, these repeated rows
    are the last ones, and they are excluded.
    """

    def __init__(self, accelerator: Any, rows: int | None) -> None:
        self._accelerator, self._left = accelerator, rows
        self._sums: dict[str, list[float]] = {}

    def add(self, values: dict[str, Tensor], weights: Tensor) -> None:
        """Add values (B,) of this process's rows with `weights` (B,); all processes must add the same names."""
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
        """Return the means of all names with non-zero weight."""
        return {name: total / weight for name, (total, weight) in self._sums.items() if weight}


class Throughput:
    """Accumulates counts and times; `drain` returns the rates over all ranks and resets."""

    def __init__(self):
        self._documents, self._generated_tokens, self._seconds = 0, 0, 0.0

    def add(self, documents: int = 0, generated_tokens: int = 0, seconds: float = 0.0) -> None:
        self._documents += documents
        self._generated_tokens += generated_tokens
        self._seconds += seconds

    def drain(self, accelerator=None) -> dict[str, float]:
        """Return `throughput/documents_per_s`, `throughput/generated_tokens_per_s` and `memory/peak_gib`.

        The memory is the maximum over ranks. Empty if no time was added since the last call.
        """
        if self._seconds == 0:
            return {}
        device = accelerator.device if accelerator is not None else "cpu"
        sums = torch.tensor([self._documents, self._generated_tokens, self._seconds], dtype=torch.float32).to(device)
        peak = torch.tensor([peak_memory_gib()]).to(device)
        ranks = 1
        if accelerator is not None:
            ranks = accelerator.num_processes
            sums, peak = accelerator.reduce(sums, "sum"), accelerator.gather(peak).max()
        seconds = sums[2].item() / ranks
        self.__init__()
        return {
            "throughput/documents_per_s": sums[0].item() / seconds,
            "throughput/generated_tokens_per_s": sums[1].item() / seconds,
            "memory/peak_gib": peak.item(),
        }


def peak_memory_gib() -> float:
    """Return the peak memory in GiB: allocated on the current CUDA device if available, or else resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
