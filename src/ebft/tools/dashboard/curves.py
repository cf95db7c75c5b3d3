"""Which curves are shown for a run, in which order, and the range in which a metric is healthy."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
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


Range = tuple[float | None, float | None]  # None: no bound


@dataclass
class Curve:
    """A plot: its title, one or more series by label, the desired direction (^, v or none), a healthy range."""

    title: str
    series: dict[str, Series]
    wanted: str = ""
    healthy: Range | None = None

    def values(self) -> dict[str, float]:
        """The last value of each series that has one."""
        return {label: series.values[-1] for label, series in self.series.items() if series.values}


# Title, metrics with labels, desired direction.
_CURVES: tuple[tuple[str, dict[str, str], str], ...] = (
    ("alignment", {"ebft/alignment": ""}, "^"),
    ("diversity", {"ebft/diversity": ""}, "v"),
    ("reward", {"ebft/mean_reward": ""}, "^"),
    ("total reward", {"reward": ""}, "^"),
    ("loss", {"loss": ""}, ""),
    ("cfm_loss", {"ebft/cfm_loss": ""}, "v"),
    ("grad_norm", {"grad_norm": ""}, ""),
    ("grad norms of terms", {"ebft/rl_grad_norm": "rl", "ebft/ce_grad_norm": "ce"}, ""),
    ("ce_loss", {"ebft/ce_loss": ""}, "v"),
    ("rl_loss", {"ebft/rl_loss": ""}, ""),
    ("held-out cfm_loss", {"eval_cfm_loss": ""}, "v"),
    ("held-out ce_loss", {"eval_ce_loss": ""}, "v"),
    ("held-out loss", {"eval_loss": ""}, "v"),
    ("held-out alignment", {"eval_alignment": ""}, "^"),
    ("held-out reward", {"eval_reward": ""}, "^"),
    ("entropy", {"entropy": ""}, ""),
    ("kl", {"kl": ""}, ""),
    ("reward_std", {"reward_std": ""}, ""),
    ("completion length", {"completions/mean_length": ""}, ""),
    ("truncated completions", {"completions/clipped_ratio": ""}, "v"),
    ("learning_rate", {"learning_rate": ""}, ""),
    ("generated tokens per second", {"throughput/generated_tokens_per_s": ""}, ""),
)


def curves_of(metrics: Metrics, config: dict[str, Any]) -> list[Curve]:
    """The curves for the metrics that the run has; parts of a total reward share a plot."""
    found = []
    for title, labels, wanted in _CURVES:
        series = {label or title: metrics.series[name] for name, label in labels.items() if name in metrics.series}
        if series:
            found.append(Curve(title, series, wanted, healthy_range(title, config)))
    parts = {
        name.removeprefix("rewards/").removesuffix("/mean"): series
        for name, series in metrics.series.items()
        if name.startswith("rewards/") and name.endswith("/mean")
    }
    if parts and list(parts) != ["feature_matching"]:
        position = next((index + 1 for index, curve in enumerate(found) if curve.title == "total reward"), 0)
        found.insert(position, Curve("rewards", parts, "^"))
    return found


def healthy_range(title: str, config: dict[str, Any]) -> Range | None:
    """The usual range of values of a curve, by the method and the reward of the config; None if there is none.

    Values outside can be right for a run; they are a reason to look at its rollouts.
    """
    method, ebft = config.get("rl"), config.get("ebft")
    if title == "grad_norm":
        return {"ebft": (None, 3.0), "grpo": (None, 1.0), "gdpo": (None, 1.0)}.get(str(method), (None, 10.0))
    if method == "ebft" and title == "alignment" and isinstance(ebft, dict) and ebft.get("use_whitening"):
        return (0.3, 1.9)
    if method in ("ebft", "grpo", "gdpo"):
        return {"kl": (0.0, 0.5), "truncated completions": (None, 0.3)}.get(title)
    return None


def range_text(healthy: Range) -> str:
    """A range as text, for example `0.3-0.9` or `<0.1`."""
    low, high = healthy
    if low is None:
        return f"<{high:g}"
    return f">{low:g}" if high is None else f"{low:g}-{high:g}"
