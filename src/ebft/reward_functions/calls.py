"""Calls of user-defined reward functions, with errors that name the function, its line and what it returned."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from functools import update_wrapper
from itertools import islice
from typing import Any

from ebft.config.user_code import user_code
from ebft.errors import RewardError

_ATOMS = (int, float, str, bool)


def _each(wrap: Callable[[Any], Any], reward_funcs: Any) -> Any:
    return [wrap(function) for function in reward_funcs] if isinstance(reward_funcs, list) else wrap(reward_funcs)


def checked_functions(reward_funcs: Any) -> Any:
    """The reward functions such that errors and invalid rewards raise RewardError.

    Models are returned unchanged, and so are rewards of this package, which trainers recognise by their class.
    """
    return _each(_checked, reward_funcs)


def _checked(function: Any) -> Any:
    from torch import nn  # not imported in worker processes

    is_ours = any(of.__module__.partition(".")[0] == "ebft" for of in type(function).__mro__)
    if not callable(function) or isinstance(function, nn.Module) or is_ours:
        return function
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):

        async def call(**given: Any) -> list[float | None]:
            prompts = list(given["prompts"])
            with user_code(f"The reward function {name_of(function)}", RewardError):
                return rewards_of(function, await function(**_own(given)), prompts)

    else:

        def call(**given: Any) -> list[float | None]:
            return call_function(function, _own(given))

    update_wrapper(call, function)
    if not hasattr(function, "__name__"):  # the name for logs, which callable objects may lack
        call.__name__ = getattr(getattr(function, "func", None), "__name__", type(function).__name__)
    return call


def call_function(function: Callable, given: dict[str, Any]) -> list[float | None]:
    """Call the function and return its rewards. Raises RewardError if it fails or they cannot be used."""
    prompts = list(given["prompts"])
    with user_code(f"The reward function {name_of(function)}", RewardError, passes=RewardError):
        return rewards_of(function, function(**given), prompts)


def _own(value: Any) -> Any:
    """A copy of nested lists and dicts, such as messages, for a function that may change what it is given."""
    if type(value) is dict:
        return {key: _own(each) for key, each in value.items()}
    if type(value) is not list:
        return value
    if value and type(value[0]) in _ATOMS and type(value[-1]) in _ATOMS:
        return value.copy()
    return [_own(each) for each in value]


def rewards_of(function: Callable, found: Any, prompts: list) -> list[float | None]:
    """The rewards that a function returned, one per completion. Raises RewardError if they cannot be used.

    A reward is a finite number, or None if the function does not apply; NaN is neither.
    """
    name = f"The reward function {name_of(function)}"
    if isinstance(found, bytes | Mapping | Set):
        raise RewardError(f"{name} returned a {type(found).__name__}; it must return a list in the completions' order.")
    rewards = list(islice(found, len(prompts) + 1))  # a generator may have no end
    if len(rewards) != len(prompts):
        count = f"more than {len(prompts)}" if len(rewards) > len(prompts) else len(rewards)
        raise RewardError(
            f"{name} returned {count} rewards for {len(prompts)} completions. It must return one per "
            "completion, or None for no reward."
        )
    for index, value in enumerate(rewards):
        if value is not None and (isinstance(value, str) or not math.isfinite(value)):
            raise RewardError(
                f"{name} returned {value!r:.80} for completion {index} (prompt {prompts[index]!r:.80}). Rewards must "
                "be finite numbers, or None for no reward."
            )
    return [None if value is None else float(value) for value in rewards]


def name_of(function: Callable) -> str:
    module = getattr(function, "__module__", None)  # functions of other libraries may have none
    name = getattr(function, "__qualname__", repr(function))
    return f"{module}.{name}" if module else name


def run_in_chunks(reward_funcs: Any, groups: int, group_size: Callable[[], int]) -> Any:
    """Return the reward functions such that plain ones are called with at most `groups` prompt groups at a time."""
    return _each(lambda function: _in_chunks(function, groups, group_size), reward_funcs)


def _in_chunks(function: Any, groups: int, group_size: Callable[[], int]) -> Any:
    if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
        return function

    def call(**given: Any) -> list[float | None]:
        rewards: list[float | None] = []
        logged: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for columns, others in chunks(given, groups * group_size()):
            size = len(columns["prompts"])
            if "log_metric" in others:
                note = lambda name, value, size=size: logged[name].append((value, size))
                others = others | {"log_metric": note}
            rewards += rewards_of(function, function(**columns, **others), columns["prompts"])
        for name, values in logged.items():  # one value per batch, as without chunks
            given["log_metric"](name, sum(v * size for v, size in values) / sum(size for _, size in values))
        return rewards

    return update_wrapper(call, function)


def chunks(given: dict[str, Any], size: int) -> Iterator[tuple[dict[str, list], dict[str, Any]]]:
    """Yield the lists of all completions among the arguments, `size` completions at a time; and the other arguments."""
    count = len(given["prompts"])
    is_column = lambda value: isinstance(value, list | tuple) and len(value) == count
    columns = {name: list(value) for name, value in given.items() if is_column(value)}
    others = {name: value for name, value in given.items() if name not in columns}
    for start in range(0, count, size):
        yield {name: value[start : start + size] for name, value in columns.items()}, others
