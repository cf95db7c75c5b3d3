"""Calls of reward functions: in worker processes by group (`reward_num_workers`), or with some groups at a time."""

from __future__ import annotations

import inspect
import multiprocessing
import pickle
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import update_wrapper
from typing import Any

from pebble import ProcessExpired, ProcessFuture, ProcessPool
from torch import nn

from ebft.errors import ConfigError, EBFTError
from ebft.structured.checked_rewards import errors_of, rewards_of

RewardFunction = Callable[..., list[float | None]]


class RewardWorkers:
    """A pool of `count` processes that call reward functions, one prompt group of `group_size()` completions at a time.

    Each process calls the function in its main thread, where `signal.alarm` can be used. A call that takes longer than
    `timeout` seconds ends its process, and so does a crash; the process is replaced. A group whose call timed out, or
    crashed twice, has no reward (None), with a warning. Exceptions of a function raise RewardError, which says where.
    """

    def __init__(self, count: int, timeout: float | None, group_size: Callable[[], int]) -> None:
        self._timeout, self._group_size = timeout, group_size
        # Forked copies of a process that has threads can deadlock.
        self._pool = ProcessPool(max_workers=count, context=multiprocessing.get_context("spawn"))
        self._has_worked = False
        self._warned: set[str] = set()
        self.close = weakref.finalize(self, _stop, self._pool)

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
        groups = [columns for columns, _ in _split(given, self._group_size())]
        rewards: list[float | None] = []
        for group, future in [(group, self._schedule(function, group)) for group in groups]:
            rewards += self._result(function, group, future)
        return rewards

    def _schedule(self, function: RewardFunction, group: dict[str, list]) -> ProcessFuture:
        return self._pool.schedule(_outcome, args=(function, group), timeout=self._timeout)

    def _result(self, function: RewardFunction, group: dict[str, list], future: ProcessFuture) -> list[float | None]:
        size = len(group["prompts"])
        try:
            try:
                found, error = future.result()
            except ProcessExpired:
                found, error = self._schedule(function, group).result()
        except TimeoutError:
            return self._without(function, f"took longer than {self._timeout:g} s (reward_timeout)", size)
        except ProcessExpired as error:
            if not self._has_worked:
                raise ConfigError(
                    f"reward_num_workers: the processes for {function.__qualname__} end with exit code "
                    f"{error.exitcode} before they return a reward. If training is started by a script, guard its "
                    'code with `if __name__ == "__main__":`, since each process imports the script.'
                ) from error
            return self._without(function, f"ended its process twice (exit code {error.exitcode})", size)
        self._has_worked = True
        if error is not None:
            raise error
        return found

    def _without(self, function: RewardFunction, reason: str, size: int) -> list[None]:
        if function.__qualname__ not in self._warned:
            self._warned.add(function.__qualname__)
            warnings.warn(
                f"{function.__qualname__} {reason} for the completions of a prompt, which get no reward from it. "
                "This warning is given once.",
                stacklevel=2,
            )
        return [None] * size


def _outcome(function: RewardFunction, group: dict[str, list]) -> tuple[list[float | None], EBFTError | None]:
    """Call the function in a worker, and return its rewards and None, or nothing and the error to raise."""
    try:
        with errors_of(function):
            return rewards_of(function, function(**group), group["prompts"]), None
    except EBFTError as error:
        return [], error


def run_in_workers(reward_funcs: Any, count: int, timeout: float | None, group_size: Callable[[], int]) -> Any:
    """Return the reward functions such that plain functions run in `count` processes, or unchanged if `count` is 1."""
    funcs = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    if count == 1 or not any(inspect.isfunction(function) for function in funcs):
        return reward_funcs
    workers = RewardWorkers(count, timeout, group_size)
    return [function if isinstance(function, nn.Module) else workers.parallel(function) for function in funcs]


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
            for columns, others in _split(given, groups * group_size()):
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


def _split(given: dict[str, Any], size: int) -> Iterator[tuple[dict[str, list], dict[str, Any]]]:
    """Yield the lists of all completions among the arguments, `size` completions at a time, and the other arguments."""
    count = len(given["prompts"])
    columns = {name: list(value) for name, value in given.items() if _is_column(value, count)}
    others = {name: value for name, value in given.items() if name not in columns}
    for start in range(0, count, size):
        yield {name: value[start : start + size] for name, value in columns.items()}, others


def _is_column(value: Any, count: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == count


def _stop(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()
