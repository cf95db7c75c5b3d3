"""The noise of a short series of evaluations, estimated so that a step or a trend does not count as noise.

T: number of values; R: number of simulated series.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

_SIMULATED = 40_000  # series per quantile
_LONG = 8  # values from which differences between neighbours show the noise around any smooth curve
_NORMAL_MAD = 1.4826  # standard deviation of a normal variable over its median absolute deviation
_MOST = 100  # values; quantiles of longer series are those of this length


def series_error(values: list[float]) -> float | None:
    """The standard error of the difference of two values of a series of at least four.

    None if the values vary but take two values only, such as the share of correct answers to very few prompts, since
    those of unlucky noise are then the same as those of a step without noise.
    """
    if len(set(values)) == 2:
        return None
    series = torch.tensor([values], dtype=torch.float64)
    return math.sqrt(2) * float(_noise(series - series[:, :1])[0])


@cache
def series_quantile(length: int, level: float) -> float:
    """What |last - first| / `series_error` exceeds with probability `level` in series of independent normal values."""
    generator = torch.Generator().manual_seed(0)
    length = min(length, _MOST)
    found = []
    for _ in range(10):
        series_RT = torch.randn(_SIMULATED // 10, length, dtype=torch.float64, generator=generator)
        found.append((series_RT[:, -1] - series_RT[:, 0]).abs() / (math.sqrt(2) * _noise(series_RT)))
    return float(torch.cat(found).quantile(1 - level))


@cache
def t_quantile(freedom: int, level: float) -> float:
    """What the absolute value of a variable with Student's t distribution exceeds with probability `level`."""
    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_tail(middle, freedom) > level else (low, middle)
    return high


def _t_tail(value: float, freedom: int) -> float:
    """P(|t| > value) for an even number of degrees of freedom, as a finite sum (Abramowitz and Stegun, 26.7.4)."""
    assert freedom % 2 == 0
    sine, cosine2 = value / math.sqrt(freedom + value**2), freedom / (freedom + value**2)
    term = total = 1.0
    for index in range(1, freedom // 2):
        term *= cosine2 * (2 * index - 1) / (2 * index)
        total += term
    return 1 - sine * total


def _noise(series_RT: Tensor) -> Tensor:
    """The standard deviation of the noise of each series [R]: the least of those around a line, around a step, and, for
    long series, between neighbours."""
    length = series_RT.shape[1]
    centred_RT = series_RT - series_RT.mean(1, keepdim=True)
    total_R = centred_RT.square().sum(1)
    time_T = torch.arange(length, dtype=series_RT.dtype) - (length - 1) / 2
    explained = [(centred_RT @ time_T).square() / time_T.square().sum()]
    sums_RT = centred_RT.cumsum(1)[:, :-1]  # of the values before a step at 1, ..., T - 1
    sizes_T = torch.arange(1, length, dtype=series_RT.dtype)
    explained.append((sums_RT.square() * length / (sizes_T * (length - sizes_T))).amax(1))
    residual_R = (total_R - torch.stack(explained).amax(0)).clamp(min=0)
    noise_R = (residual_R / (length - 2)).sqrt()
    if length >= _LONG:
        steps_RT = series_RT.diff(dim=1)
        deviations_RT = (steps_RT - steps_RT.median(1, keepdim=True).values).abs()
        noise_R = torch.minimum(noise_R, _NORMAL_MAD * deviations_RT.median(1).values / math.sqrt(2))
    return noise_R
