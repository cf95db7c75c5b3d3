"""What a run learned, in a few lines, from its log history."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from statistics import mean, variance
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The metrics of an outcome, most important first, and whether greater is better.
_PREFERENCES = {"rewards/accuracies": True, "rewards/margins": True}
_HELD_OUT = {
    "eval_cfm_loss": False,
    "eval_alignment": True,
    "eval_reward": True,
    "eval_ce_loss": False,
    **{f"eval_{name}": greater for name, greater in _PREFERENCES.items()},
}
_TRAINING = {"ebft/cfm_loss": False, "ebft/alignment": True, "reward": True, "ebft/ce_loss": False, **_PREFERENCES}
_SFT_LOSS = {"loss": False}  # with rewards, the loss itself is not informative
_COMPARISON = "This compares the trained model with the base model and gives confidence intervals:\n  "
_FEWEST = 4  # values on each side of a comparison, and evaluations for the error of their difference
_ERRORS = 3  # standard errors that a change of training must exceed at least, since neighbouring logs are similar
_LEVEL = 0.03  # probability that any metric without a change is counted as changed, under independent normal noise


class Change(NamedTuple):
    """The change of a metric between two parts of a run.

    `error` is its standard error and `limit` the change that it must exceed to count; None if unknown.
    """

    name: str
    before: float
    after: float
    error: float | None
    limit: float | None
    greater_is_better: bool

    @property
    def improvement(self) -> float:
        """The difference, positive if the metric became better."""
        return (self.after - self.before) * (1 if self.greater_is_better else -1)

    @property
    def verdict(self) -> int | None:
        """1: better, -1: worse, 0: not more than the limit, None: the error is unknown."""
        if self.limit is None:
            return None if self.improvement else 0
        if abs(self.improvement) <= self.limit:
            return 0
        return 1 if self.improvement > 0 else -1

    @property
    def may_be_worse(self) -> bool:
        """Whether the metric moved in the wrong direction by 1.5 standard errors, or at all if they are unknown."""
        return -self.improvement > 1.5 * (self.error or 0.0)

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.2g}, counts from {self.limit:.2g}"
        return f"{self.name} {self.before:.4g} -> {self.after:.4g} ({self.after - self.before:+.2g}{error})"


def training_outcome(
    log_history: list[dict[str, Any]],
    evaluate: str | None = "ebft evaluate CONFIG",
    unresolved: Sequence[str] = (),
    has_held_out: bool | None = None,
) -> str:
    """Return a few lines on whether the run of `log_history` (`trainer.state.log_history`) learned anything.

    `evaluate` is the command that compares the trained model with the base model, None if there is none, and
    `unresolved` are the names of health conditions that still hold at the end (`HealthCallback.unresolved`).
    `has_held_out`: whether the run has held-out data; by default, whether it was evaluated at least once.

    Compares the first evaluation with the last one, whose standard error is known from four evaluations on. With fewer,
    also compares the first and the last fifth of the logs of training, and concludes from these. A change counts if it
    exceeds a limit that depends on its standard error, the number of values, and the number of metrics.
    """
    held_out = list(_held_out_changes(log_history))
    is_known = bool(held_out) and all(change.error is not None for change in held_out)
    training = [] if is_known else list(_training_changes(log_history))
    if not held_out and not training:
        return "\n".join(_with_unresolved(_unknown(log_history, evaluate, has_held_out), unresolved))
    parts = [f"Outcome: {_conclusion(training, held_out)}."]
    if training:
        parts.append(f"First and last fifth of the training logs:{_listed(training)}")
    if held_out:
        names = {change.name for change in held_out}
        steps = [entry.get("step") for entry in log_history if not names.isdisjoint(entry)]
        first = steps[0]
        parts.append(f"First and last evaluation (steps {first} and {steps[-1]}):{_listed(held_out)}")
        if first:
            parts.append(
                f"The first evaluation already followed {first} step{'s' * (first != 1)} of training, so it is not "
                "one of the base model; eval_on_start: true evaluates before the first step."
            )
    if any(change.error is not None for change in (*held_out, *training)):
        parts.append("± is one standard error.")
    if held_out and not is_known:
        parts.append(
            "The standard error is unknown with fewer than four evaluations, or if they have only two different values."
        )
        parts += [] if evaluate is None else [_COMPARISON + evaluate]
    return "\n".join(_with_unresolved(parts, unresolved))


def _unknown(log_history: list[dict[str, Any]], evaluate: str | None, has_held_out: bool | None) -> list[str]:
    """The parts of an outcome of which nothing can be said, with what would help: settings that are not yet set."""
    count = sum(any(name.startswith("eval_") for name in entry) for entry in log_history)
    too_few = f"fewer than {2 * _FEWEST} entries of training"
    if not (count or has_held_out):
        settings = "Set test_datasets or val_set_size with eval_steps, or train longer."
        return [f"Outcome: unknown. The log has fewer than two evaluations and {too_few}.", settings]
    evaluations = "one evaluation" if count == 1 else "no evaluation" if count == 0 else "evaluations of other metrics"
    return [
        f"Outcome: unknown. The log has {evaluations} and {too_few}.",
        "Evaluate more often (a smaller eval_steps, or eval_on_start: true), or train longer.",
        *([] if evaluate is None else [_COMPARISON + evaluate]),
    ]


def _with_unresolved(parts: list[str], names: Sequence[str]) -> list[str]:
    """The parts of an outcome with a sentence on health conditions, which are the first thing to look at."""
    if not names:
        return parts
    return [parts[0], f"Reported in health.jsonl and still so at the end: {', '.join(names)}.", *parts[1:]]


def _conclusion(training: list[Change], held_out: list[Change]) -> str:
    changes = [*training, *(change for change in held_out if not training or change.error is not None)]
    verdicts = [change.verdict for change in changes]
    better = [change.name for change in changes if change.verdict == 1]
    worse = [change.name for change in changes if change.verdict == -1]
    doubtful = [change.name for change in held_out if change.may_be_worse and change.name not in worse]
    if None in verdicts and not better and not worse:
        return "unknown, since the standard error of these changes is unknown"
    if better and worse:
        return f"{_and(better)} improved, but {_and(worse)} became worse"
    if better and doubtful:
        return f"{_and(better)} improved, but {_and(doubtful)} moved in the wrong direction on held-out data"
    if better:
        return f"the model learned: {_and(better)} improved"
    if worse:
        return f"the model did not learn: {_and(worse)} became worse"
    return "no change larger than its error"


def _held_out_changes(log_history: list[dict[str, Any]]) -> Iterator[Change]:
    named = any(_values(log_history, name) for name in ("eval_ce_loss", "eval_reward", "eval_rewards/margins"))
    names = _HELD_OUT if named else {}
    found = {name: _values(log_history, name) for name in names or {"eval_loss": False}}
    found = {name: values for name, values in found.items() if len(values) >= 2}
    for name, values in found.items():
        error = series_error(values) if len(values) >= _FEWEST else None
        limit = None if error is None else error * series_quantile(len(values), _LEVEL / len(found))
        yield Change(name, values[0], values[-1], error, limit, names.get(name, False))


def _training_changes(log_history: list[dict[str, Any]]) -> Iterator[Change]:
    names = _TRAINING if any(_values(log_history, name) for name in _TRAINING) else _SFT_LOSS
    found = {name: _values(log_history, name) for name in names}
    if found.get("reward") == _values(log_history, "ebft/mean_reward"):
        found.pop("reward", None)  # alignment and diversity are its only parts
    found = {name: values for name, values in found.items() if len(values) >= 2 * _FEWEST}
    for name, values in found.items():
        part = max(_FEWEST, len(values) // 5)
        first, last = values[:part], values[-part:]
        error = math.sqrt((variance(first) + variance(last)) / part)
        limit = error * max(_ERRORS, t_quantile(2 * part - 2, _LEVEL / len(found)))
        yield Change(name, mean(first), mean(last), error, limit, names[name])


def _values(log_history: list[dict[str, Any]], name: str) -> list[float]:
    found = [entry[name] for entry in log_history if isinstance(entry.get(name), (int, float))]
    return [value for value in found if math.isfinite(value)]


def _listed(changes: list[Change]) -> str:
    return "".join(f"\n  {change}" for change in changes)


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


_SIMULATED = 40_000  # series per quantile
_LONG = 8  # values from which differences between neighbours show the noise around any smooth curve
_NORMAL_MAD = 1.4826  # standard deviation of a normal variable over its median absolute deviation
_LONGEST = 100  # values; quantiles of longer series are those of this length


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
    length = min(length, _LONGEST)
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
