"""Means over seeds with 95% intervals by Student's t, of values and of paired differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# 97.5% quantiles of Student's t for 1, 2, ... degrees of freedom.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
T_BEYOND = 2.131  # 15 degrees; a little wide for more


@dataclass(frozen=True)
class Estimate:
    """A mean over `count` seeds and the half width of its interval: NaN where one seed says nothing about others."""

    mean: float
    half: float
    count: int

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


def estimate(values: list[float]) -> Estimate | None:
    """Mean and interval of the values of several seeds; None without any."""
    n = len(values)
    if n == 0:
        return None
    mean = sum(values) / n
    if n == 1:
        return Estimate(mean, math.nan, 1)
    if len(set(values)) == 1:
        return Estimate(values[0], 0.0, n)
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    quantile = T_QUANTILES[n - 2] if n - 2 < len(T_QUANTILES) else T_BEYOND
    return Estimate(mean, quantile * math.sqrt(variance / n), n)


def by_seed(
    cells: list[dict[str, Any]], group: str, value: Callable[[dict[str, Any]], float | None]
) -> dict[int, float]:
    """The value of each seed of a group of cells, those without it left out."""
    found = {cell["cell"]["seed"]: value(cell) for cell in cells if cell["cell"]["group"] == group}
    return {seed: number for seed, number in found.items() if number is not None and not math.isnan(number)}


def over_seeds(cells: list[dict[str, Any]], group: str, metric: str) -> Estimate | None:
    """A metric of a group of cells."""
    return estimate(list(by_seed(cells, group, metric_value(metric)).values()))


def difference(cells: list[dict[str, Any]], group: str, other: str, metric: str) -> Estimate | None:
    """How much higher a metric of `group` is than of `other`, paired by seed; a start has one value for all seeds."""
    ours, theirs = (by_seed(cells, name, metric_value(metric)) for name in (group, other))
    if is_start(other) and theirs:
        theirs = dict.fromkeys(ours, next(iter(theirs.values())))
    return estimate([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])


def metric_value(metric: str) -> Callable[[dict[str, Any]], float | None]:
    """Reads a metric of a cell."""
    return lambda cell: cell["metrics"].get(metric)


def is_start(group: str) -> bool:
    """Whether a group is an untrained start, measured once."""
    return group.endswith("-none")
