"""The rules of the table in callback.py, which states each in words (`when`).

A rule returns the step since which the condition holds and what was seen, or None. It is called after every entry of
the log, so it must tolerate the noise of single steps: it compares medians, with a margin that depends on the noise.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import correlation, mean, median
from typing import Any, NamedTuple


class Sighting(NamedTuple):
    """What a rule found."""

    since: int
    saw: str


def non_finite(log: Log) -> Sighting | None:
    # A reward function that returned no reward is logged as NaN; fp16 skips infinite gradients.
    for name in sorted(log.names):
        wait = 3 if name == "grad_norm" and log.fp16 else 1
        since = log[name].all_since(lambda value: not math.isfinite(value), wait)
        if since is not None and not name.startswith(("rewards/", "eval_rewards/")):
            return Sighting(since, f"{name} is {log[name].last[-1][1]}")
    return None


def samples_alike(log: Log) -> Sighting | None:
    series, ceiling = log["ebft/diversity"], log.diversity_ceiling
    start = series.start()
    if ceiling is None or start is None or ceiling - start < 1e-3 * ceiling:
        return None
    limit = max(ceiling - (ceiling - start) / 3, start + series.margin())
    change = f"ebft/diversity rose from {start:.3f} to {{:.3f}}; it is {ceiling:.3f} if all samples are identical"
    return series.seen(lambda value: value > limit, change)


def entropy_collapse(log: Log) -> Sighting | None:
    series = log["entropy"]
    start = series.start()
    if start is None or start < 0.02 or log.is_of_preferences:
        return None
    return series.seen(lambda value: value < max(0.1 * start, 0.01), f"entropy fell from {start:.3g} to {{:.3g}}")


def diversity_dominates(log: Log) -> Sighting | None:
    series = log["ebft/mean_reward"]
    start = series.start()
    if start is None or median(series.recent()) > start + 0.1:
        return None
    return series.seen(lambda value: value < -0.9, "ebft/mean_reward stays at {:.2f}", PERSISTENT)


def low_alignment(log: Log) -> Sighting | None:
    return log["ebft/alignment"].seen(lambda value: value < 0.1, "ebft/alignment stays at {:.3f}", PERSISTENT)


def no_signal(log: Log) -> Sighting | None:
    since = log["frac_reward_zero_std"].all_since(lambda value: value > 0.99, PERSISTENT)
    if since is not None:
        equal = "the rewards of each prompt's completions are all equal (frac_reward_zero_std is 1)"
        stds = [name for name in sorted(log.names) if name.startswith("rewards/") and name.endswith("/std")]
        without = lambda std: std == 0 or math.isnan(std)
        constant = [name for name in stds if log[name].all_since(without, PERSISTENT) is not None]
        named = ", ".join(name.removeprefix("rewards/").removesuffix("/std") for name in constant)
        equal += f"; {named}: the same value, or None, for every completion" if named else ""
        return Sighting(since, equal)
    since = log["ebft/advantages_std"].all_since(lambda value: abs(value) < 1e-6, WINDOW)
    if since is not None:
        return Sighting(since, "ebft/advantages_std is 0: all advantages are equal")
    since = log["grad_norm"].all_since(lambda value: abs(value) < 1e-6, PERSISTENT)
    return None if since is None else Sighting(since, "grad_norm is 0")


def reward_always_zero(log: Log) -> Sighting | None:
    for name in sorted(log.names):
        if name.startswith("rewards/") and name.endswith("/mean"):
            since = log[name].all_since(lambda value: value == 0, PERSISTENT)
            if since is not None and since == log[name].first[0][0]:
                return Sighting(since, f"{name} has been 0 in every log so far")
    return None


def cross_entropy_diverges(log: Log) -> Sighting | None:
    name = log.cross_entropy
    series = log[name]
    if series.first:
        base = series.first[0][1]
        since = series.all_since(lambda value: value > max(3 * base, base + 3), 3)
        if since is not None:
            return Sighting(since, f"{name} rose from {base:.3g} to {series.last[-1][1]:.3g}")
    start = series.start()
    if start is not None:
        limit = start + max(0.3, 0.1 * start, series.margin())
        seen = series.seen(lambda value: value > limit, f"{name} rose from {start:.3f} to {{:.3f}}")
        if seen is not None:
            return seen
    return _held_out_rise(log["eval_ce_loss"], "eval_ce_loss", 0.3, 0.1)


def loss_spikes(log: Log) -> Sighting | None:
    name = log.cross_entropy
    series, spikes = log[name], list[int]()
    values = [value for _, value in series.last]
    if len(values) < _KEPT or not all(value > 0 and math.isfinite(value) for value in values):
        return None
    noise = _noise([math.log(value) for value in values])  # losses of batches are skewed
    for i in range(START, len(values) - START):
        around = median(values[i - START : i] + values[i + 1 : i + 1 + START])
        is_spike = math.log(values[i] / around) > max(math.log(2), _ERRORS * noise) and values[i] > around + 0.5
        if is_spike and (not spikes or i - spikes[-1] > START):  # neighbours are one spike
            spikes.append(i)
    if len(spikes) < SPIKES:
        return None
    listed = ", ".join(f"{values[i]:.3g} at step {series.last[i][0]}" for i in spikes)
    return Sighting(series.last[spikes[0]][0], f"{name} was more than twice the logs around it: {listed}")


def cfm_diverges(log: Log) -> Sighting | None:
    # With whitening, the loss of training is in a space of the samples, which changes: its rise means nothing.
    series = log["ebft/cfm_loss"]
    seen, start = series.seen(lambda value: value > 100, "ebft/cfm_loss is {:.3g}"), series.start()
    if seen is None and start is not None and not log.whitened:
        limit = max(1.5 * start, start + series.margin())
        seen = series.seen(lambda value: value > limit, f"ebft/cfm_loss rose from {start:.3f} to {{:.3f}}")
    return seen or _held_out_rise(log["eval_cfm_loss"], "eval_cfm_loss", 0.05, 0.5)


def overfitting(log: Log) -> Sighting | None:
    series, training = log["eval_ce_loss"], log.series.get(log.cross_entropy, MetricSeries())
    last, start = series.recent(4), training.start()
    if not last or start is None or median(training.recent()) > start - training.margin():
        return None
    rises = all(b > a for a, b in zip(last, last[1:])) and last[-1] > last[0] + max(0.03, 0.02 * last[0])
    if not rises:
        return None
    step = series.last[-4][0]
    return Sighting(step, f"eval_ce_loss rose from {last[0]:.3f} to {last[-1]:.3f} while {log.cross_entropy} fell")


def unstable_gradient(log: Log) -> Sighting | None:
    series = log["grad_norm"]
    start = series.start()
    if start is None:
        return None
    return series.seen(lambda value: value > max(10, 5 * start), f"grad_norm rose from {start:.3g} to {{:.3g}}")


def off_policy(log: Log) -> Sighting | None:
    difference, ratio = log["sampling/sampling_logp_difference/mean"], log["sampling/importance_sampling_ratio/min"]
    seen = difference.seen(lambda value: value > 1, "sampling/sampling_logp_difference/mean is {:.2f}")
    if seen is None and difference.recent() and median(difference.recent()) > 0.1:
        seen = ratio.seen(lambda value: value < 0.01, "sampling/importance_sampling_ratio/min is {:.1g}")
    clipped = log["clip_ratio/region_mean"]
    return seen or clipped.seen(lambda value: value > 0.3, "clip_ratio/region_mean is {:.2f}")


def far_from_reference(log: Log) -> Sighting | None:
    # KTO sums it over tokens
    return None if log.is_of_preferences else log["kl"].seen(lambda value: value > 2, "kl is {:.2f}")


def rejected_preferred(log: Log) -> Sighting | None:
    series = log["rewards/margins"]
    start = series.start()
    if start is None:
        return None
    limit = min(0.0, start - series.margin())
    change = f"rewards/margins fell from {start:.3f} to {{:.3f}}"
    return series.seen(lambda value: value < limit, change, PERSISTENT)


def truncation(log: Log) -> Sighting | None:
    series = log["completions/clipped_ratio"]
    since = series.since(lambda value: value > 0.8)
    if since is None:
        return None
    return Sighting(since, f"{mean(series.recent()):.0%} of the completions reach their maximum length")


def length_rewarded(log: Log) -> Sighting | None:
    lengths, rewards = log["completions/mean_length"], log["reward"]
    start = lengths.start()
    count = min(len(lengths), len(rewards))
    if start is None or count < 30:
        return None
    limit = max(1.5 * start, start + lengths.margin())
    since = lengths.since(lambda value: value > limit)
    changes = [[b - a for a, b in zip(values, values[1:])] for values in (lengths.recent(count), rewards.recent(count))]
    if since is None or any(len(set(values)) < 2 or not all(map(math.isfinite, values)) for values in changes):
        return None
    strength = correlation(*changes)
    if strength < 0.5:
        return None
    now = median(lengths.recent())
    return Sighting(
        since,
        f"completions/mean_length grew from {start:.0f} to {now:.0f}, and its changes correlate with the changes of "
        f"the reward ({strength:.2f})",
    )


def _held_out_rise(series: MetricSeries, name: str, absolute: float, relative: float) -> Sighting | None:
    """The last two evaluations are above the first one. Evaluations use the same documents, so they vary little."""
    if len(series) < 3:
        return None
    base = series.first[0][1]
    since = series.all_since(lambda value: value > base + max(absolute, relative * base), 2)
    return None if since is None else Sighting(since, f"{name} rose from {base:.3f} to {series.last[-1][1]:.3f}")


def _noise(values: list[float]) -> float:
    """The standard deviation of one value, from successive differences, which a trend hardly changes."""
    differences = [abs(b - a) for a, b in zip(values, values[1:])]
    return 1.4826 * median(differences) / math.sqrt(2) if differences else math.inf


START = 5  # values at the start of the run
WINDOW = 10  # most recent values
PERSISTENT = 20  # values for conditions that are normal for a few steps
SPIKES = 3  # jumps of a loss; one or two are normal
_KEPT = 50
# A change must exceed this multiple of its standard error, since every log is tested.
_ERRORS = 5.0


class MetricSeries:
    """The values of one metric with their steps: the first `START` and the last 50."""

    def __init__(self) -> None:
        self.first: list[tuple[int, float]] = []
        self.last: deque[tuple[int, float]] = deque(maxlen=_KEPT)

    def add(self, step: int, value: float) -> None:
        if len(self.first) < START:
            self.first.append((step, value))
        self.last.append((step, value))

    def __len__(self) -> int:
        return len(self.last)

    def recent(self, count: int = WINDOW) -> list[float]:
        """The last `count` values, or an empty list if there are fewer."""
        return [value for _, value in self.last][-count:] if len(self.last) >= count else []

    def start(self) -> float | None:
        """Return the median of the first values, or None if the last `WINDOW` values may include a first one."""
        if len(self.last) < min(START + WINDOW, _KEPT):
            return None
        return median(value for _, value in self.first)

    def margin(self) -> float:
        """Return a change of the recent median against the start that noise does not explain."""
        # pi/2: variance of a median
        return _ERRORS * _noise([value for _, value in self.last]) * math.sqrt(math.pi / 2 * (1 / START + 1 / WINDOW))

    def since(self, holds: Callable[[float], bool], count: int = WINDOW) -> int | None:
        """Return the first of the last `count` steps whose value `holds`, if that is true of their median."""
        values = self.recent(count)
        if not values or not holds(median(values)):
            return None
        return next((step for step, value in list(self.last)[-count:] if holds(value)), None)

    def seen(self, holds: Callable[[float], bool], text: str, count: int = WINDOW) -> Sighting | None:
        """Return what `since` found, with the median of the last `count` values in place of `{}` in the text."""
        since = self.since(holds, count)
        return None if since is None else Sighting(since, text.format(median(self.recent(count))))

    def all_since(self, holds: Callable[[float], bool], count: int) -> int | None:
        """Return the first of the last `count` steps if every value `holds`."""
        values = self.recent(count)
        return self.last[-count][0] if values and all(map(holds, values)) else None


@dataclass
class Log:
    """The series of a run, by metric, and what of its settings the rules need."""

    samples: int | None = None  # per prompt or anchor
    whitened: bool | None = None  # None if unknown
    fp16: bool = False
    series: dict[str, MetricSeries] = field(default_factory=dict)
    names: frozenset[str] = frozenset()  # of the metrics in the newest entry

    def add(self, step: int, entry: dict[str, Any]) -> None:
        """Add the numbers of one entry of the trainer's log."""
        numbers = {name: value for name, value in entry.items() if isinstance(value, (int, float))}
        self.names = frozenset(numbers)
        for name, value in numbers.items():
            self.series.setdefault(name, MetricSeries()).add(step, value)

    def __getitem__(self, name: str) -> MetricSeries:
        """Return the series of a metric; an empty one if it is not in the newest entry, which then says nothing new."""
        return self.series[name] if name in self.names else MetricSeries()

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
        """The metric with the training cross-entropy: the loss itself if there is no reward; empty if there is none."""
        if not {"mean_reward", "margin", "accuracy"}.isdisjoint(self.series):  # the loss of a reward model
            return ""
        has_reward = any(name.startswith(("ebft/", "reward")) for name in self.series)
        return "ebft/ce_loss" if has_reward else "loss"
