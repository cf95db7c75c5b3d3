"""Means over seeds and documents, of values and of paired differences, with 95% intervals over seeds and files.

Training seeds give a half width by Student's t over their means, and test files one by the spread of the files' means:
documents of one file are alike, and are one draw. The two add in quadrature, which errs to the wide side.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import Any

# 97.5% quantiles of Student's t for 1, 2, ... degrees of freedom.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)


@dataclass(frozen=True)
class Estimate:
    """A mean, and the half widths of its intervals over seeds and over files: NaN where one says nothing of others.

    A model without seeds has 0 over seeds.
    """

    mean: float
    seeds: float
    files: float
    count: int  # of seeds

    @property
    def half(self) -> float:
        return math.hypot(self.seeds, self.files)


@dataclass(frozen=True)
class Measured:
    """A metric of one model: its sum on each document, the documents' weights, and the files that they are from."""

    sums: list[float]
    weights: list[float]
    files: list[str]

    @property
    def mean(self) -> float:
        return sum(self.sums) / sum(self.weights)

    def __sub__(self, other: Measured) -> Measured:
        return Measured([a - b for a, b in zip(self.sums, other.sums, strict=True)], self.weights, self.files)


def over_seeds(cells: list[dict[str, Any]], group: str, metric: str) -> Estimate | None:
    """A metric of a group of cells; None where none has it."""
    return estimate(list(by_seed(cells, group, metric).values()), has_seeds=not is_start(group))


def difference(cells: list[dict[str, Any]], group: str, other: str, metric: str) -> Estimate | None:
    """How much higher a metric of `group` is than of `other`, paired by seed (a start has one) and document."""
    ours, theirs = by_seed(cells, group, metric), by_seed(cells, other, metric)
    if is_start(other) and theirs:
        theirs = dict.fromkeys(ours, next(iter(theirs.values())))
    elif is_start(group) and ours:
        ours = dict.fromkeys(theirs, next(iter(ours.values())))
    return estimate([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])


def by_seed(cells: list[dict[str, Any]], group: str, metric: str) -> dict[int, Measured]:
    """The metric of each seed of a group of cells, those without it left out; two cells may measure one model."""
    return {
        cell["cell"]["seed"]: Measured(cell["sums"][metric], cell["weights"][metric], cell["files"][metric])
        for cell in cells
        if cell["cell"]["group"] == group and metric in cell["sums"]
    }


def estimate(found: list[Measured], has_seeds: bool = True) -> Estimate | None:
    """Mean and interval of what several seeds gave on the same documents; None without any."""
    if not found:
        return None
    n = len(found)
    means = [one.mean for one in found]
    average = replace(found[0], sums=[sum(sums) / n for sums in zip(*(one.sums for one in found))])
    return Estimate(average.mean, spread_of_seeds(means) if has_seeds else 0.0, spread_of_files(average), n)


def spread_of_seeds(means: list[float]) -> float:
    """Half width of Student's interval of the mean of `means`: NaN of one, which says nothing of others."""
    n = len(means)
    return math.nan if n == 1 else t_quantile(n - 1) * statistics.stdev(means) / math.sqrt(n)


def spread_of_files(found: Measured) -> float:
    """Half width of the interval over files of a ratio of sums, by the linearised variance of such a ratio."""
    residuals: dict[str, float] = {}
    for total, weight, file in zip(found.sums, found.weights, found.files, strict=True):
        if weight:
            residuals[file] = residuals.get(file, 0.0) + total - found.mean * weight
    n = len(residuals)
    if n == 1:
        return math.nan
    variance = sum(value**2 for value in residuals.values()) * n / (n - 1) / sum(found.weights) ** 2
    return t_quantile(n - 1) * math.sqrt(variance)


def t_quantile(n: int) -> float:
    """The 97.5% quantile of Student's t with n degrees of freedom, beyond the table by its expansion."""
    z = 1.95996  # of the normal distribution
    expansion = z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    return T_QUANTILES[n - 1] if n <= len(T_QUANTILES) else expansion


def seeds_of(cells: list[dict[str, Any]], group: str) -> set[int]:
    """The seeds of a group."""
    return {cell["cell"]["seed"] for cell in cells if cell["cell"]["group"] == group}


def is_start(group: str) -> bool:
    """Whether a group is an untrained start, measured once."""
    return group.endswith("-none")
