"""Calls of reward functions in worker processes (`reward_num_workers`), one prompt group at a time."""

from __future__ import annotations

import inspect
import multiprocessing
import pickle
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from ebft.errors import ConfigError, RewardError
from ebft.reward_functions.checked import name_of, outcome
from ebft.reward_functions.chunks import split
from ebft.reward_functions.processes import NAME, Expired, Processes

_DEATHS = 8  # calls after which a function whose process always ended is an error
_GUARD = 'If training is started by a script, guard its code with `if __name__ == "__main__":`.'
RewardFunction = Callable[..., list[float | None]]


class RewardWorkers:
    """A pool of `count` processes that call reward functions, one prompt group of `group_size()` completions at a time.

    Each process calls the function in its main thread, where `signal.alarm` can be used. A call that takes longer than
    `timeout` seconds ends its process, and so does a crash; the process is replaced. A group whose call timed out, or
    crashed twice, has no reward (None), with a warning. Exceptions of a function raise RewardError, which says where,
    and so does a function that crashed in each of its first 8 calls.
    """

    def __init__(self, count: int, timeout: float | None, group_size: Callable[[], int]) -> None:
        self._timeout, self._group_size = timeout, group_size
        self._processes = Processes(count, timeout)
        self._has_called = False
        self._warned: set[str] = set()
        self._deaths: Counter[str] = Counter()  # by function, until a call returns
        self._returned: set[str] = set()
        self.close = self._processes.close

    def parallel(self, function: Any) -> Any:
        """Return a reward function that calls `function` in the processes.

        Models, names of models, callable objects and coroutine functions are returned unchanged. Raises ConfigError
        for a function that cannot be sent to another process.
        """
        if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
            return function
        try:
            pickle.dumps(function)
        except (pickle.PicklingError, AttributeError) as error:
            raise ConfigError(
                f"reward_num_workers: {function.__qualname__} cannot be called in another process ({error}). Define it "
                "at the top level of a module, or set reward_num_workers: 1."
            ) from error

        def call(**given: Any) -> list[float | None]:
            return self._call(function, given)

        return update_wrapper(call, function)

    def _call(self, function: RewardFunction, given: dict[str, Any]) -> list[float | None]:
        """Call the function on all groups. Arguments that are not lists of all completions are not passed on."""
        groups = [columns for columns, _ in split(given, self._group_size())]
        found = self._processes.map(outcome, [(function, group) for group in groups])
        again = [i for i, result in enumerate(found) if isinstance(result, Expired) and result.exit_code is not None]
        for i, result in zip(again, self._processes.map(outcome, [(function, groups[i]) for i in again])):
            found[i] = result
        self._has_called = self._has_called or any(not isinstance(each, Expired) or each.was_called for each in found)
        self._count(function, found)
        return [reward for group, result in zip(groups, found) for reward in self._rewards(function, group, result)]

    def _count(self, function: RewardFunction, found: list[Any]) -> None:
        name, ends = name_of(function), [each for each in found if isinstance(each, Expired)]
        codes = [end.exit_code for end in ends if end.exit_code is not None and end.was_called]
        self._deaths[name] += len(codes)
        if len(ends) < len(found):
            self._returned.add(name)
        if codes and name not in self._returned and self._deaths[name] >= _DEATHS:
            raise RewardError(
                f"The reward function {name} ended its process in each of its {self._deaths[name]} calls so far (exit "
                f"code {codes[-1]}; a negative one is a signal), so that it gave no reward. It crashes, or calls "
                "os._exit() or os.kill(). Call it with known completions in a script of its own."
            )

    def _rewards(self, function: RewardFunction, group: dict[str, list], result: Any) -> list[float | None]:
        size = len(group["prompts"])
        if not isinstance(result, Expired):
            rewards, error = result
            if error is not None:
                raise error
            return rewards
        if result.exit_code is None:
            return self._without(function, f"took longer than {self._timeout:g} s (reward_timeout)", size)
        if not self._has_called:
            raise ConfigError(
                f"reward_num_workers: the processes for {function.__qualname__} end with exit code {result.exit_code} "
                f"before they can call it, since each has to import it from {function.__module__}; they have printed "
                f"why. {_GUARD} A function of a notebook, or of code without a file, must be moved to a module."
            )
        return self._without(function, f"ended its process twice (exit code {result.exit_code})", size)

    def _without(self, function: RewardFunction, reason: str, size: int) -> list[None]:
        if function.__qualname__ not in self._warned:
            self._warned.add(function.__qualname__)
            warnings.warn(
                f"{function.__qualname__} {reason} for the completions of a prompt, which get no reward from it. "
                "This warning is given once.",
                stacklevel=2,
            )
        return [None] * size


def run_in_workers(reward_funcs: Any, count: int, timeout: float | None, group_size: Callable[[], int]) -> Any:
    """Return the reward functions such that plain functions run in `count` processes, or unchanged if `count` is 1."""
    funcs = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    if multiprocessing.current_process().name == NAME:
        sys.exit(f"A process for reward functions has imported the script, which starts training again. {_GUARD}")
    if count == 1 or not any(inspect.isfunction(function) for function in funcs):
        return reward_funcs
    workers = RewardWorkers(count, timeout, group_size)
    return [workers.parallel(function) for function in funcs]
