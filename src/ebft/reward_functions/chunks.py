"""Calls of reward functions with some prompt groups at a time."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import update_wrapper
from typing import Any

from ebft.reward_functions.checked import rewards_of


def run_in_chunks(reward_funcs: Any, groups: int, group_size: Callable[[], int]) -> Any:
    """Return the reward functions such that plain functions are called with at most `groups` prompt groups at a time.

    Models, callable objects and coroutine functions are returned unchanged.
    """

    def in_chunks(function: Any) -> Any:
        if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
            return function

        def call(**given: Any) -> list[float | None]:
            rewards: list[float | None] = []
            logged: dict[str, list[tuple[float, int]]] = defaultdict(list)
            for columns, others in split(given, groups * group_size()):
                size = len(columns["prompts"])
                if "log_metric" in others:
                    note = lambda name, value, size=size: logged[name].append((value, size))
                    others = others | {"log_metric": note}
                rewards += rewards_of(function, function(**columns, **others), columns["prompts"])
            for name, values in logged.items():  # one value per batch, as without chunks
                given["log_metric"](name, sum(v * size for v, size in values) / sum(size for _, size in values))
            return rewards

        return update_wrapper(call, function)

    if not isinstance(reward_funcs, list):
        return in_chunks(reward_funcs)
    return [in_chunks(function) for function in reward_funcs]


def split(given: dict[str, Any], size: int) -> Iterator[tuple[dict[str, list], dict[str, Any]]]:
    """Yield the lists of all completions among the arguments, `size` completions at a time, and the other arguments."""
    count = len(given["prompts"])
    columns = {name: list(value) for name, value in given.items() if _is_column(value, count)}
    others = {name: value for name, value in given.items() if name not in columns}
    for start in range(0, count, size):
        yield {name: value[start : start + size] for name, value in columns.items()}, others


def _is_column(value: Any, count: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == count
