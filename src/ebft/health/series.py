"""The logged values of each metric, with the robust statistics that the rules of the table use.

Single steps are noisy, so rules compare medians: of the first `START` values, which are close to the base model, and of
the last `WINDOW` values. Only a bounded number of values is kept.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

START = 5  # values at the start of the run
WINDOW = 10  # most recent values
PERSISTENT = 20  # values for conditions that are normal for a few steps
_KEPT = 50
# A change must exceed this multiple of its standard error, since every log is tested.
_ERRORS = 5.0


class Series:
    """The values of one metric with their steps: the first `START` and the last 50."""

    def __init__(self) -> None:
        self.first: list[tuple[int, float]] = []
        self.last: deque[tuple[int, float]] = deque(maxlen=_KEPT)

    def add(self, step: int, value: float) -> None:
        if len(self.first) < START:
            self.first.append((step, value))
        self.last.append((step, value))

    def __len__(self) -> int:
        """Return the number of recent values that are kept, at most 50."""
        return len(self.last)

    def recent(self, count: int = WINDOW) -> list[float]:
        """Return the last `count` values, or an empty list if there are fewer."""
        return [value for _, value in self.last][-count:] if len(self.last) >= count else []

    def start(self) -> float | None:
        """Return the median of the first values, or None if the last `WINDOW` values may include one of them."""
        if len(self.last) < min(START + WINDOW, _KEPT):
            return None
        return median(value for _, value in self.first)

    def margin(self) -> float:
        """Return a change of the recent median against the start that noise does not explain.

        The standard deviation of one value is estimated from successive differences, which a trend hardly changes.
        """
        values = self.recent(len(self.last))
        differences = [abs(b - a) for a, b in zip(values, values[1:])]
        if not differences:
            return math.inf
        noise = 1.4826 * median(differences) / math.sqrt(2)
        return _ERRORS * noise * math.sqrt(math.pi / 2 * (1 / START + 1 / WINDOW))  # pi/2: variance of a median

    def since(self, holds: Callable[[float], bool], count: int = WINDOW) -> int | None:
        """Return the first of the last `count` steps whose value `holds`, if that is true of their median."""
        values = self.recent(count)
        if not values or not holds(median(values)):
            return None
        return next((step for step, value in list(self.last)[-count:] if holds(value)), None)

    def all_since(self, holds: Callable[[float], bool], count: int) -> int | None:
        """Return the first of the last `count` steps if the value of each of them `holds`."""
        values = self.recent(count)
        return self.last[-count][0] if values and all(map(holds, values)) else None


@dataclass
class Log:
    """The series of a run, by metric, and what of its settings the rules need."""

    samples: int | None = None  # per prompt or anchor
    whitened: bool | None = None  # None if unknown
    fp16: bool = False
    series: dict[str, Series] = field(default_factory=dict)
    names: frozenset[str] = frozenset()  # of the metrics in the newest entry

    def add(self, step: int, entry: dict[str, Any]) -> None:
        """Add the numbers of one entry of the trainer's log."""
        numbers = {name: value for name, value in entry.items() if isinstance(value, (int, float))}
        self.names = frozenset(numbers)
        for name, value in numbers.items():
            self.series.setdefault(name, Series()).add(step, value)

    def __getitem__(self, name: str) -> Series:
        """Return the series of a metric; an empty one if it is not in the newest entry, which then says nothing new."""
        return self.series[name] if name in self.names else Series()

    @property
    def diversity_ceiling(self) -> float | None:
        """The diversity of identical samples: 2, or 2/n if n samples are whitened. None if unknown."""
        if not self.whitened:
            return None if self.whitened is None else 2.0
        return 2 / self.samples if self.samples else None

    @property
    def is_of_preferences(self) -> bool:
        """Whether completions of the data are compared, and none are sampled."""
        return any(name in self.series for name in ("rewards/chosen", "rewards/rejected"))

    @property
    def cross_entropy(self) -> str:
        """The metric with the training cross-entropy: the loss itself if there is no reward."""
        has_reward = any(name.startswith(("ebft/", "reward")) for name in self.series)
        return "ebft/ce_loss" if has_reward else "loss"
