"""What a run learned, in one paragraph, from its log history."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import mean, stdev, variance
from typing import Any, NamedTuple

# The metrics of an outcome, most important first, and whether greater is better.
_HELD_OUT = {"eval_cfm_loss": False, "eval_alignment": True, "eval_reward": True, "eval_ce_loss": False}
_TRAINING = {"ebft/cfm_loss": False, "ebft/alignment": True, "reward": True, "ebft/ce_loss": False}
_SFT_LOSS = {"loss": False}  # with rewards, the loss itself is not informative
_FEWEST = 4  # values on each side of a comparison, and evaluations for the error of their difference
_ERRORS = 3  # standard errors that a change must exceed: several metrics are compared, on neighbouring logs


class Change(NamedTuple):
    """The change of a metric between two parts of a run; `error` is its standard error, None if unknown."""

    name: str
    before: float
    after: float
    error: float | None
    greater_is_better: bool

    @property
    def verdict(self) -> int | None:
        """1: better, -1: worse, 0: not more than three standard errors, None: the error is unknown."""
        difference = self.after - self.before
        if self.error is None:
            return None if difference else 0
        if abs(difference) <= _ERRORS * self.error:
            return 0
        return 1 if (difference > 0) == self.greater_is_better else -1

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.2g}"
        return f"{self.name} {self.before:.4g} -> {self.after:.4g} ({self.after - self.before:+.2g}{error})"


def training_outcome(log_history: list[dict[str, Any]]) -> str:
    """Return one paragraph on whether the run of `log_history` (`trainer.state.log_history`) learned anything.

    Compares the first evaluation with the last one, whose standard error is known from four evaluations on. With fewer,
    also compares the first and the last fifth of the logs of training, and concludes from these. Changes of at most
    three standard errors are not counted as changes.
    """
    held_out = list(_held_out_changes(log_history))
    is_known = bool(held_out) and all(change.error is not None for change in held_out)
    training = [] if is_known else list(_training_changes(log_history))
    if not held_out and not training:
        return (
            f"Outcome: unknown. The log has fewer than two evaluations and fewer than {2 * _FEWEST} entries of "
            "training. Set test_datasets or val_set_size with eval_steps, or train longer."
        )
    parts = [f"Outcome: {_conclusion(training or held_out)}."]
    if training:
        parts.append(f"First and last fifth of the training logs: {_listed(training)}.")
    if held_out:
        parts.append(f"First and last evaluation: {_listed(held_out)}.")
    if any(change.error is not None for change in (*held_out, *training)):
        parts.append("± is one standard error; a change counts from three.")
    if held_out and not is_known:
        parts.append(
            "Fewer than four evaluations do not show how much these metrics vary: `ebft evaluate CONFIG` compares the "
            "trained model with the base model and gives confidence intervals."
        )
    return " ".join(parts)


def _conclusion(changes: list[Change]) -> str:
    verdicts = [change.verdict for change in changes]
    better = [change.name for change in changes if change.verdict == 1]
    worse = [change.name for change in changes if change.verdict == -1]
    if None in verdicts and not better and not worse:
        return "unknown, since the standard error of these changes is unknown"
    if better and worse:
        return f"{_and(better)} improved, but {_and(worse)} became worse"
    if better:
        return f"the model learned: {_and(better)} improved"
    if worse:
        return f"the model did not learn: {_and(worse)} became worse"
    return "no change larger than its error"


def _held_out_changes(log_history: list[dict[str, Any]]) -> Iterator[Change]:
    names = _HELD_OUT if _values(log_history, "eval_ce_loss") or _values(log_history, "eval_reward") else {}
    for name, greater_is_better in (names or {"eval_loss": False}).items():
        values = _values(log_history, name)
        if len(values) < 2:
            continue
        differences = [b - a for a, b in zip(values, values[1:])]
        # Differences between successive evaluations vary by the noise of two evaluations, like that of first and last.
        error = stdev(differences) if len(values) >= _FEWEST else None
        yield Change(name, values[0], values[-1], error, greater_is_better)


def _training_changes(log_history: list[dict[str, Any]]) -> Iterator[Change]:
    names = _TRAINING if any(_values(log_history, name) for name in _TRAINING) else _SFT_LOSS
    for name, greater_is_better in names.items():
        values = _values(log_history, name)
        if name == "reward" and values == _values(log_history, "ebft/mean_reward"):
            continue  # alignment and diversity are its only parts
        part = max(_FEWEST, len(values) // 5)
        if len(values) < 2 * part:
            continue
        first, last = values[:part], values[-part:]
        error = math.sqrt((variance(first) + variance(last)) / part)
        yield Change(name, mean(first), mean(last), error, greater_is_better)


def _values(log_history: list[dict[str, Any]], name: str) -> list[float]:
    found = [entry[name] for entry in log_history if isinstance(entry.get(name), (int, float))]
    return [value for value in found if math.isfinite(value)]


def _listed(changes: list[Change]) -> str:
    return "; ".join(map(str, changes))


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
