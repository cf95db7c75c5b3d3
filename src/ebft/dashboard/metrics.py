"""The metrics of a run over its steps, in bounded memory, and what follows from them: speed and remaining time."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

MAX_POINTS = 4096  # per metric; beyond that, neighbouring points are averaged
_NO_METRICS = ("step", "time", "epoch")
_RECENT_LOGS = 50  # that the speed is measured over
# Metrics that do not compare models: each model's features are whitened with its own samples.
NOT_COMPARABLE = ("cfm_loss_whitened",)


class Series:
    """The values of a metric: `steps` and `values` of equal length, each point a mean over `width` logs."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.values: list[float] = []
        self.width = 1
        self._pending: list[tuple[float, float]] = []

    def add(self, step: float, value: float) -> None:
        """Append a value; steps do not decrease."""
        self._pending.append((step, value))
        if len(self._pending) < self.width:
            return
        steps, values = zip(*self._pending)
        self.steps.append(sum(steps) / self.width)
        self.values.append(sum(values) / self.width)
        self._pending.clear()
        if len(self.steps) > MAX_POINTS:
            self.steps, self.values = _halved(self.steps), _halved(self.values)
            self.width *= 2


def _halved(values: list[float]) -> list[float]:
    """Means of neighbours; a last value without one is kept."""
    pairs = [(a + b) / 2 for a, b in zip(values[::2], values[1::2])]
    return pairs + values[len(pairs) * 2 :]


class Metrics:
    """All metrics in the lines of metrics.jsonl: `series` and the last value of each by name, the `last_step`."""

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}
        self.latest: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self.last_step: float | None = None
        self._times: deque[tuple[float, float]] = deque(maxlen=_RECENT_LOGS)

    def add(self, line: dict[str, Any]) -> None:
        """Add a line; values that are not finite numbers are left out, and lines without a step ignored."""
        step, time = line.get("step"), line.get("time")
        if not is_number(step):
            return
        self.last_step = step
        if is_number(time) and any(name in line for name in ("loss", "grad_norm")):  # a log of training
            self._times.append((time, step))
        for name, value in line.items():
            if name not in _NO_METRICS and is_number(value):
                self.series.setdefault(name, Series()).add(step, value)
                self.latest[name] = value
                self.first.setdefault(name, value)

    def seconds_per_step(self, since: float = 0.0) -> float | None:
        """Mean duration of the last steps that were logged at or after the time `since`, or None if unknown."""
        times = [(time, step) for time, step in self._times if time >= since]
        if len(times) < 2 or times[-1][1] <= times[0][1]:
            return None
        return max(0.0, (times[-1][0] - times[0][0]) / (times[-1][1] - times[0][1]))


def is_number(value: Any) -> bool:
    """Whether `value` is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


def evaluation_changes(metrics: Metrics) -> list[tuple[str, float, float]]:
    """Name, first and last value of each held-out metric that was measured at least twice.

    Speeds and metrics that do not compare models are left out.
    """
    found = []
    for name, series in metrics.series.items():
        left_out = name.endswith(("_runtime", "_per_second")) or name.removeprefix("eval_") in NOT_COMPARABLE
        if name.startswith("eval_") and not left_out and (len(series.values) > 1 or series.width > 1):
            found.append((name, metrics.first[name], metrics.latest[name]))
    return found
