"""Downstream metrics: user-defined functions of full completions, reported as pass@k and for greedy completions."""

from __future__ import annotations

import copy
import math
import numbers
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ebft.config.user_code import find_function, named_call, state_kept
from ebft.errors import ConfigError
from ebft.scores import Scores, best_of

KEY = "evaluation.metrics"
TAKEN = ("alignment", "reward")  # names with a built-in pass@k
Metric = Callable[[Any, list[Any], dict[str, Any]], float | None]


def load_metrics(names: list[str]) -> dict[str, Metric]:
    """Return the metrics by the name under which they are reported.

    It is the function's name, or its full import path if that name is not unique. Raises ConfigError for duplicates.
    """
    short = Counter(name.rpartition(".")[2] for name in names)
    short.update(TAKEN)
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ConfigError(f"{KEY}: {repeated[0]!r} is listed more than once. Remove the duplicate.")
    return {last if short[last := name.rpartition(".")[2]] == 1 else name: find_function(KEY, name) for name in names}


def add_downstream(
    scores: Scores,
    metrics: dict[str, Metric],
    document: int,
    prompt: Any,
    completions: list[Any],
    greedy: Any,
    row: dict[str, Any],
    pass_at: list[int],
) -> None:
    """Add `NAME_pass@k` of the sampled completions and `NAME_greedy` for every metric that applies to the row."""
    for name, metric in metrics.items():
        values = [_value(name, metric, prompt, completion, row) for completion in [*completions, greedy]]
        if None in values:
            continue
        sampled = torch.tensor(values[:-1], dtype=torch.float64)
        for k in pass_at:
            scores.add(f"{name}_pass@{k}", [document], best_of(sampled, k)[None])
        scores.add(f"{name}_greedy", [document], [values[-1]])


def _value(name: str, metric: Metric, prompt: Any, completion: Any, row: dict[str, Any]) -> float | None:
    says = lambda happened: (
        f"{KEY}: {name} failed: {happened}. It is called as {name}(prompt, completions, row) with a "
        f"list of one completion, here {completion!r:.200}."
    )
    with named_call(f"{KEY}: {name}", ConfigError, says), state_kept(f"{KEY}: {name}"):
        value = metric(copy.deepcopy(prompt), [copy.deepcopy(completion)], copy.deepcopy(row))
        found = float(value) if isinstance(value, numbers.Real | np.bool_) else value
    if found is None or (isinstance(found, float) and math.isfinite(found)):
        return found
    said = repr(found)[:200] if isinstance(found, float | str) else type(found).__name__
    raise ConfigError(
        f"{KEY}: {name} returned {said} for the completion {completion!r:.200}. It must return a finite number, or "
        "None if it does not apply to the row."
    )
