"""What a run's files say, kept up to date while they grow: its state, metrics with their curves, samples and log."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from ebft.health.outcome import NAMES, Outcome, outcome_of
from ebft.methods.method import find_method
from ebft.run_files import HEALTH, LOG, METRICS, ROLLOUTS, JsonTail, Tail, read_run, state_of
from ebft.tools.dashboard.rollouts import Sample, is_number, one_of_each, samples_of

_NEWEST_BYTES = 2 * 2**20  # of the rollouts and the log that are read at first
_ENTRIES, _SAMPLES, _LINES, _MESSAGES = 20, 16, 500, 200
MAX_POINTS = 4096  # per metric; beyond that, neighbouring points are averaged
_NO_METRICS = ("step", "time", "epoch")
_RECENT_LOGS = 50  # that the speed is measured over
# Metrics that do not compare models: each model's features are whitened with its own samples.
NOT_COMPARABLE = ("cfm_loss_whitened",)
# Metrics of an evaluation; metrics of a user's own functions are better if they are higher.
LOWER_IS_BETTER = ("ce_loss", "ce_loss_all", "perplexity", "perplexity_all", "cfm_loss", "cfm_loss_plugin", "diversity")


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


def _halved(values: list[float]) -> list[float]:  # means of neighbours; a last value without one is kept
    pairs = [(a + b) / 2 for a, b in zip(values[::2], values[1::2])]
    return pairs + values[len(pairs) * 2 :]


class Metrics:
    """Metrics of metrics.jsonl by name: `series`, `first` and `latest`; `history` has what an outcome depends on."""

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}
        self.latest: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self.last_step: float | None = None
        self.history: list[dict[str, Any]] = []
        self._times: deque[tuple[float, float]] = deque(maxlen=_RECENT_LOGS)

    def add(self, line: dict[str, Any]) -> None:
        """Add a line; values that are not finite numbers are left out, and lines without a step ignored."""
        step, time = line.get("step"), line.get("time")
        if not is_number(step):
            return
        self.last_step = step
        if is_number(time) and any(name in line for name in ("loss", "grad_norm")):  # a log of training
            self._times.append((time, step))
        kept = {name: value for name, value in line.items() if name in NAMES or name.startswith("eval_")}
        if kept:
            numbers = {name: value if is_number(value) else None for name, value in kept.items()}
            self.history.append({"step": step, **numbers})
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


Range = tuple[float | None, float | None]  # None: no bound


@dataclass
class Curve:
    """A plot: its title, one or more series by label, the desired direction (^, v or none), a healthy range.

    `rounding` is the largest difference of values that counts as a rounding error.
    """

    title: str
    series: dict[str, Series]
    wanted: str = ""
    healthy: Range | None = None
    rounding: float = 1e-7  # of sums of float32 numbers around 1, such as advantages

    def last_values(self) -> dict[str, float]:
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
    found, ebft = [], config.get("ebft") or {}
    # Usual ranges of values, by method and reward; values outside can be right for a run.
    healthy = find_method(config.get("rl"), ebft.get("mode", "structured")).healthy
    for title, labels, wanted in _CURVES:
        series = {label or title: metrics.series[name] for name, label in labels.items() if name in metrics.series}
        if series:
            usual = healthy.get(f"whitened {title}" if ebft.get("use_whitening") else title, healthy.get(title))
            found.append(Curve(title, series, wanted, usual))
            if title == "learning_rate":  # which may be as small
                found[-1].rounding = 0.0
    of_functions = [name for name in metrics.series if name.startswith("rewards/") and name.endswith("/mean")]
    parts = {name.removeprefix("rewards/").removesuffix("/mean"): metrics.series[name] for name in of_functions}
    if parts and list(parts) != ["feature_matching"]:
        position = next((index + 1 for index, curve in enumerate(found) if curve.title == "total reward"), 0)
        found.insert(position, Curve("rewards", parts, "^"))
    return found


def range_text(healthy: Range) -> str:
    """A range as text, for example `0.3-0.9` or `<0.1`."""
    low, high = healthy
    if low is None:
        return f"<{high:g}"
    return f">{low:g}" if high is None else f"{low:g}-{high:g}"


class LiveRun:
    """The state, metrics, newest rollouts, health messages and log of a run; `poll` reads what is new."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run: dict[str, Any] = {}
        self.state = "unknown"
        self.metrics = Metrics()
        self.health: deque[dict[str, Any]] = deque(maxlen=_MESSAGES)
        self.log: deque[str] = deque(maxlen=_LINES)
        self.is_missing = False
        self.logs = 0  # lines of metrics.jsonl read so far, to draw curves only if there are new ones
        self._outcome: tuple[int, Outcome | None] = (-1, None)
        self._entries: deque[dict[str, Any]] = deque(maxlen=_ENTRIES)
        self._metrics, self._health = JsonTail(folder / METRICS), JsonTail(folder / HEALTH)
        self._rollouts = JsonTail(folder / ROLLOUTS, _NEWEST_BYTES)
        self._log = Tail(folder / LOG, _NEWEST_BYTES)

    def poll(self) -> None:
        """Read what was written since the last call."""
        self.is_missing = not self.folder.is_dir()
        self.run = read_run(self.folder)
        self.state = state_of(self.run)
        lines, restarts = self._metrics.read()
        if restarts:
            self.metrics = Metrics()
            self.logs += 1
        for line in lines:
            self.metrics.add(line)
        self.logs += len(lines)
        for tail, kept in ((self._health, self.health), (self._rollouts, self._entries), (self._log, self.log)):
            found, restarts = tail.read()
            if restarts:
                kept.clear()
            kept.extend(found)

    @property
    def corrupted(self) -> int:
        return sum(tail.corrupted for tail in (self._metrics, self._health, self._rollouts))

    @property
    def config(self) -> dict[str, Any]:
        """The config of the run as resolved; empty if unknown."""
        return self.run.get("config") or {}

    def curves(self) -> list[Curve]:
        return curves_of(self.metrics, self.config)

    def outcome(self) -> Outcome | None:
        """Whether the run has learned anything so far, as `ebft train` prints at its end; None before its first log."""
        if self._outcome[0] != self.logs:
            config, found = self.config, None
            if self.metrics.history:
                has_held_out = bool(config.get("test_datasets") or config.get("val_set_size"))
                strategy = "no" if config.get("evals_per_epoch") == 0 else config.get("eval_strategy")
                whitens = bool((config.get("ebft") or {}).get("use_whitening"))
                found = outcome_of(self.metrics.history, None, (), has_held_out, strategy, whitens)
            self._outcome = self.logs, found
        return self._outcome[1]

    def newest(self) -> list[Sample]:
        """The first samples of the newest entry of the log, then one of each earlier entry, newest first."""
        if not self._entries:
            return []
        *earlier, last = self._entries
        return [*islice(samples_of(last), _SAMPLES), *one_of_each(reversed(earlier))]

    @property
    def step(self) -> float:
        """The number of finished optimizer steps."""
        return max(self.run.get("global_step") or 0, self.metrics.last_step or 0)

    @property
    def max_steps(self) -> int | None:
        """The number of steps of the whole run, or None if unknown."""
        return self.run.get("max_steps") or None

    def seconds_per_step(self) -> float | None:
        """Mean duration of the last steps since the run was started or resumed, or None if unknown."""
        return self.metrics.seconds_per_step(since=self.run.get("started") or 0.0)

    def seconds_left(self) -> float | None:
        """Estimated time until the last step of a running run, or None if unknown."""
        each = self.seconds_per_step()
        if self.state != "running" or self.max_steps is None or each is None:
            return None
        return max(0.0, (self.max_steps - self.step) * each)

    def seconds_run(self) -> float | None:
        """Time since the start of the run, until now or its end, or None if unknown."""
        started = self.run.get("started")
        until = time.time() if self.state == "running" else self.run.get("updated")
        return None if started is None or until is None else max(0.0, until - started)

    def seconds_since_update(self) -> float:
        """Time since run.json was written; 0 if unknown."""
        updated = self.run.get("updated")
        return 0.0 if updated is None else max(0.0, time.time() - updated)


def local_time(seconds: float | None) -> str | None:
    """Seconds since 1970 as a local date and time."""
    return None if seconds is None else datetime.fromtimestamp(seconds).isoformat(" ", "seconds")


def clock(value: str | None) -> str:
    """A time of a message, in the ISO form of health.jsonl, as hours, minutes and seconds."""
    return str(value or "")[11:19]
