"""What a run learned, in a few lines, from its log history. Imports no torch: the dashboard and the report show it.

R  series   T  values of a series
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np  # imported where it computes: `ebft --help` reads this file too

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
# Metrics of training that cannot be compared between steps if each step whitens the features by its own samples.
_WHITENED = ("ebft/cfm_loss", "ebft/alignment", "reward")
_SFT_LOSS = {"loss": False}  # with rewards, the loss itself is not informative
NAMES = frozenset({*_HELD_OUT, "eval_loss", *_TRAINING, *_SFT_LOSS, "ebft/mean_reward"})  # what an outcome depends on
# Rewards can be missing: functions return None for what they do not score.
_ALWAYS_FINITE = ("eval_cfm_loss", "eval_alignment", "eval_ce_loss", "eval_loss", "ebft/cfm_loss", "loss")
_COMPARISON = "This compares the trained model with the base model and gives confidence intervals:\n  "
_FEWEST = 4  # evaluations for the error of their difference; half of the logs of training
_LEVEL = 0.03  # probability that any metric without a change is counted as changed, under normal noise
_BLOCKS = 10  # of the logs of training, whose means are compared
_MEMORY = 25  # logs of training over which noise may be similar: a correlation of up to 0.95 between neighbours


class Change(NamedTuple):
    """The change of a metric between two parts of a run.

    `error` is its standard error, `limit` the change that it must exceed to count, and `least` what the limit would be
    with many values; None if unknown.
    """

    name: str
    before: float
    after: float
    error: float | None
    limit: float | None
    least: float | None
    greater_is_better: bool

    @property
    def improvement(self) -> float:
        """The difference, positive if the metric became better."""
        return (self.after - self.before) * (1 if self.greater_is_better else -1)

    @property
    def verdict(self) -> int | None:
        """1: better, -1: worse, 0: no more than noise, None: too few values to tell."""
        if self.limit is None or self.least is None:
            return None if self.improvement else 0
        if abs(self.improvement) <= self.limit:
            return None if abs(self.improvement) > self.least else 0
        return 1 if self.improvement > 0 else -1

    @property
    def word(self) -> str:
        return {1: "better", -1: "worse", 0: "no change", None: "too few values to tell"}[self.verdict]

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.2g}, significant above {self.limit:.2g}"
        return f"{self.name} {self.before:.4g} -> {self.after:.4g} ({self.after - self.before:+.2g}{error})"


class Outcome(NamedTuple):
    """Whether a run learned anything: verdict, changes, steps of the first and last evaluation, and sentences."""

    verdict: str
    training: list[Change]
    held_out: list[Change]
    steps: tuple[Any, Any] | None
    notes: list[str]
    unresolved: Sequence[str] = ()

    def __str__(self) -> str:
        parts = [f"Outcome: {self.verdict}."]
        if self.unresolved:  # the first thing to look at
            parts.append(f"Reported in health.jsonl and still so at the end: {', '.join(self.unresolved)}.")
        if self.training:
            parts.append(f"First and last tenth of the training logs:{_listed(self.training)}")
        if self.steps is not None:
            first, last = self.steps
            parts.append(f"First and last evaluation (steps {first} and {last}):{_listed(self.held_out)}")
        return "\n".join([*parts, *self.notes])


def training_outcome(
    log_history: list[dict[str, Any]],
    evaluate: str | None = "ebft evaluate CONFIG",
    unresolved: Sequence[str] = (),
    has_held_out: bool | None = None,
    eval_strategy: str | None = None,
    use_whitening: bool = False,
) -> str:
    """Return a few lines on whether the run of `log_history` (`trainer.state.log_history`) learned anything.

    `evaluate` is the command that compares the trained model with the base model, None if there is none, and
    `unresolved` are the names of health conditions that still hold at the end (`HealthCallback.unresolved`).
    `has_held_out`: whether the run has held-out data; by default, whether it was evaluated at least once.
    `eval_strategy` and `use_whitening` are the trainer's arguments. Advice depends on the first; with the
    second, the features and rewards of training are not compared, as each step has a space of its own.

    Compares the first evaluation with the last one, whose standard error is known from four evaluations on. If these
    are too few to tell, also compares the first and the last tenth of the logs of training, and concludes from these.
    A change counts if it exceeds a limit that depends on its standard error, the number of values, and the number of
    metrics. The noise of evaluations is assumed to be independent. The noise of logs of training may be
    correlated, by up to 0.95 between neighbours, so few logs need a large change.
    """
    return str(outcome_of(log_history, evaluate, unresolved, has_held_out, eval_strategy, use_whitening))


def outcome_of(
    log_history: list[dict[str, Any]],
    evaluate: str | None,
    unresolved: Sequence[str],
    has_held_out: bool | None,
    eval_strategy: str | None,
    use_whitening: bool,
) -> Outcome:
    """Return the outcome of a run in parts; see `training_outcome`."""
    last = {name: value for entry in log_history for name, value in entry.items()}
    of_metrics = [name for name in _ALWAYS_FINITE if name in last]  # metrics.jsonl has null for NaN and infinity
    if lost := [name for name in of_metrics if last[name] is None or not math.isfinite(last[name])]:
        words = f"{_and(lost)} {'is' if len(lost) == 1 else 'are'} not finite at the end"
        return Outcome(words, [], [], None, [], unresolved)
    named = any(_values(log_history, name) for name in ("eval_ce_loss", "eval_reward", "eval_rewards/margins"))
    directions = _HELD_OUT if named else {"eval_loss": False}
    evaluated = {name: values for name in directions if len(values := _values(log_history, name)) >= 2}
    level = _LEVEL / max(len(evaluated), 1)
    held_out = [_change(name, values, directions[name], level) for name, values in evaluated.items()]
    can_tell = bool(held_out) and all(change.verdict is not None for change in held_out)
    training = [] if can_tell else list(_training_changes(log_history, use_whitening))
    advice = _advice(log_history, has_held_out, eval_strategy)
    compare = [] if evaluate is None else [_COMPARISON + evaluate]
    if not held_out and not training:
        has_rows = has_held_out or any(map(_is_evaluation, log_history))
        notes = [advice, *(compare if has_rows else [])]
        why = f"fewer than {2 * _FEWEST} entries of training"
        if use_whitening and any(len(_values(log_history, name)) >= 2 * _FEWEST for name in _WHITENED):
            why = "whitened rewards of training cannot be compared between steps"
        counts = {0: "no evaluation", 1: "one evaluation"} if has_rows else {}
        count = sum(map(_is_evaluation, log_history))
        found = counts.get(count, "evaluations of other metrics" if has_rows else "fewer than two evaluations")
        verdict = f"unknown. The log has {found}{', and ' if why.startswith('w') else ' and '}{why}"
        return Outcome(verdict, [], [], None, notes, unresolved)
    steps, notes = None, []
    if held_out:
        names = {change.name for change in held_out}
        found = [entry.get("step") for entry in log_history if not names.isdisjoint(entry)]
        steps = found[0], found[-1]
        if first := steps[0]:
            notes.append(
                f"The first evaluation already followed {first} step{'s' * (first != 1)} of training, so it is not one "
                "of the base model; eval_on_start: true evaluates before the first step."
            )
    if any(change.error is not None for change in (*held_out, *training)):
        notes.append("± is one standard error.")
    if held_out and not can_tell:
        if any(change.error is None for change in held_out):
            notes.append("The standard error is unknown with fewer than four evaluations, or two different values.")
        notes += [advice, *compare]
    return Outcome(_conclusion(training, held_out), training, held_out, steps, notes, unresolved)


def _is_evaluation(entry: dict[str, Any]) -> bool:
    return any(name.startswith("eval_") for name in entry)


def _advice(log_history: list[dict[str, Any]], has_held_out: bool | None, eval_strategy: str | None) -> str:
    """What would make the outcome known: the settings that are not yet set."""
    if not (has_held_out or any(map(_is_evaluation, log_history))):
        return "Set test_datasets or val_set_size with eval_steps, or train longer."
    if eval_strategy == "no":
        return (
            'eval_strategy is "no", so held-out rows are not evaluated during training: set eval_strategy: steps with '
            "eval_steps, or epoch."
        )
    of_base = any(_is_evaluation(entry) and entry.get("step") == 0 for entry in log_history)
    ways = "a smaller eval_steps, or larger evals_per_epoch" + ("" if of_base else ", or eval_on_start: true")
    return f"Evaluate more often ({ways}), or train longer."


def _conclusion(training: list[Change], held_out: list[Change]) -> str:
    changes = [*training, *held_out]
    verdicts = [change.verdict for change in changes]
    better = [change.name for change in changes if change.verdict == 1]
    worse = [change.name for change in changes if change.verdict == -1]
    # In the wrong direction by 1.5 standard errors, or at all if they are unknown.
    doubtful = [change.name for change in held_out if -change.improvement > 1.5 * (change.error or 0.0)]
    if None in verdicts and not better and not worse:
        return f"too few {'evaluations' if held_out else 'logs of training'} to tell"
    if better and worse:
        return f"{_and(better)} improved, but {_and(worse)} became worse"
    if better and doubtful:
        return f"{_and(better)} improved, but {_and(doubtful)} moved in the wrong direction on held-out data"
    if better:
        return f"the model learned: {_and(better)} improved"
    if worse:
        return f"the model did not learn: {_and(worse)} became worse"
    return "no change larger than the noise"


def _training_changes(log_history: list[dict[str, Any]], use_whitening: bool) -> Iterator[Change]:
    names = _TRAINING if any(_values(log_history, name) for name in _TRAINING) else _SFT_LOSS
    ignored = _WHITENED if use_whitening else ()
    found = {name: _values(log_history, name) for name in names if name not in ignored}
    if found.get("reward") == _values(log_history, "ebft/mean_reward"):
        found.pop("reward", None)  # alignment and diversity are its only parts
    found = {name: values for name, values in found.items() if len(values) >= 2 * _FEWEST}
    for name, values in found.items():
        ends = [len(values) * end // _BLOCKS for end in range(_BLOCKS + 1)]
        blocks = [mean(values[start:end]) for start, end in zip(ends, ends[1:]) if start < end]
        correlation = _MEMORY / (_MEMORY + len(values) / len(blocks))  # about as for means of AR(1) noise
        yield _change(name, blocks, names[name], _LEVEL / len(found), correlation)


def _change(name: str, values: list[float], greater: bool, level: float, correlation: float = 0.0) -> Change:
    """The change from the first to the last value, if neighbours have up to this correlation."""
    error = series_error(values) if len(values) >= _FEWEST else None
    if error is None:
        return Change(name, values[0], values[-1], None, None, None, greater)
    many = len(values) if correlation else _LONGEST  # the number of blocks does not grow
    first, last = series_quantile(len(values), level, correlation), series_quantile(many, level)
    return Change(name, values[0], values[-1], error, error * first, error * last, greater)


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
_LONGEST = 100  # values; quantiles of longer series are as for this length


def series_error(values: list[float]) -> float | None:
    """The standard error of the difference of two values of a series of at least four.

    None if the values vary but take two values only, such as the share of correct answers to very few prompts, since
    unlucky noise then looks like a step without noise.
    """
    if len(set(values)) == 2:
        return None
    import numpy as np

    series = np.array([values], dtype=np.float64)
    return math.sqrt(2) * float(_noise(series - series[:, :1])[0])


@cache
def series_quantile(length: int, level: float, correlation: float = 0.0) -> float:
    """What |last - first| / `series_error` exceeds with this probability in autoregressive series of normal values."""
    import numpy as np

    generator = np.random.default_rng(0)
    length = min(length, _LONGEST)
    found = []
    for _ in range(10):
        series_RT = generator.standard_normal((_SIMULATED // 10, length))
        for time in range(1, length):
            series_RT[:, time] *= math.sqrt(1 - correlation**2)
            series_RT[:, time] += correlation * series_RT[:, time - 1]
        found.append(np.abs(series_RT[:, -1] - series_RT[:, 0]) / (math.sqrt(2) * _noise(series_RT)))
    return float(np.quantile(np.concatenate(found), 1 - level))


def _noise(series_RT: np.ndarray) -> np.ndarray:
    """The standard deviation of the noise of each series [R]: the least deviation from a line, from a step, and, for
    long series, between neighbours."""
    import numpy as np

    length = series_RT.shape[1]
    centred_RT = series_RT - series_RT.mean(1, keepdims=True)
    total_R = np.square(centred_RT).sum(1)
    time_T = np.arange(length) - (length - 1) / 2
    explained = [np.square(centred_RT @ time_T) / np.square(time_T).sum()]
    sums_RT = centred_RT.cumsum(1)[:, :-1]  # of the values before a step at 1, ..., T - 1
    sizes_T = np.arange(1, length)
    explained.append((np.square(sums_RT) * length / (sizes_T * (length - sizes_T))).max(1))
    residual_R = (total_R - np.max(explained, axis=0)).clip(min=0)
    noise_R = np.sqrt(residual_R / (length - 2))
    if length >= _LONG:
        steps_RT = np.diff(series_RT, axis=1)
        deviations_RT = np.abs(steps_RT - np.median(steps_RT, axis=1, keepdims=True))
        noise_R = np.minimum(noise_R, _NORMAL_MAD * np.median(deviations_RT, axis=1) / math.sqrt(2))
    return noise_R
