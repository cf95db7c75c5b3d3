"""Worker processes that call reward functions; one that crashes or exceeds the time limit is replaced.

Each process imports this module and what its functions need. Nothing here imports PyTorch, which would take every
process seconds and half a gigabyte.
"""

from __future__ import annotations

import inspect
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial, update_wrapper
from multiprocessing.context import SpawnContext, SpawnProcess
from queue import SimpleQueue
from typing import Any

from ebft.errors import ConfigError, RewardError
from ebft.reward_functions.calls import call_function, chunks, name_of

NAME = "ebft reward function"  # of the processes
_DEATHS = 8  # calls after which a function whose process always ended is an error
_GUARD = 'If training is started by a script, guard its code with `if __name__ == "__main__":`.'
Rewards = list[float | None]
RewardFunction = Callable[..., Rewards]


class Ended(Exception):
    """The process of a call ended. `was_called`: False if it could not import the function."""

    def __init__(self, exit_code: int | None, was_called: bool) -> None:
        self.exit_code, self.was_called = exit_code, was_called


class _Worker(SpawnContext):
    """A process that calls functions in its main thread, one at a time; programs that they start end with it.

    It is spawned, since forked copies of a process that has threads can deadlock, and is replaced when it has ended.
    """

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._process: SpawnProcess | None = None

    def Process(self, **options: Any) -> SpawnProcess:
        """Return the process of the pool, which calls this."""
        self._process = SpawnProcess(name=NAME, **options)
        return self._process

    def call(self, timeout: float | None, function: RewardFunction, columns: dict[str, list]) -> Rewards:
        """Return the rewards. Raises TimeoutError after `timeout` seconds, without imports, and Ended after a crash."""
        if self._process is None or not self._process.is_alive():
            self.stop()
            self._pool = ProcessPoolExecutor(1, self, initializer=_begin)
        is_ready = False
        try:
            self._pool.submit(name_of, function).result()
            is_ready = True
            return self._pool.submit(call_function, function, columns).result(timeout)
        except TimeoutError:
            self.stop()
            raise
        except BrokenProcessPool:
            raise Ended(self.stop(), is_ready) from None

    def stop(self) -> int | None:
        """Kill the process and the programs that it started, and return its exit code."""
        process, pool = self._process, self._pool
        self._process = self._pool = None
        if process is not None and process.pid is not None:
            process.kill()
            with suppress(ProcessLookupError, PermissionError):  # no group yet, or on macOS, all of it have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        if pool is not None:
            pool.shutdown(wait=False)
        return None if process is None else process.exitcode


def _begin() -> None:
    """Begin the life of a process, which ends with the one that started it."""
    # A separate group, so that programs that it starts can be ended with it. Ctrl-C in a terminal is not sent to it,
    # but schedulers send SIGINT to all processes of a job. The programs do not inherit a handler.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, lambda *_: None)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


class RewardWorkers:
    """A pool of `count` processes that call reward functions, one prompt group of `group_size()` completions at a time.

    Each process calls the function in its main thread, where `signal.alarm` can be used. A call that takes longer than
    `timeout` seconds ends its process, and so does a crash; the process is replaced. A group whose call timed out, or
    crashed twice, has no reward (None), with a warning. Exceptions of a function raise RewardError, which says where,
    and so does a function that crashed in each of its first 8 calls.
    """

    def __init__(self, count: int, timeout: float | None, group_size: Callable[[], int]) -> None:
        self._timeout, self._group_size = timeout, group_size
        self._workers = [_Worker() for _ in range(count)]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="ebft-rewards")
        self._has_called = False
        self._warned: set[str] = set()
        self._deaths: Counter[str] = Counter()  # by function, until a call returns

    def close(self) -> None:
        """Stop the processes and what they call."""
        for worker in self._workers:
            worker.stop()

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

        def call(**given: Any) -> Rewards:
            return self._call(function, given)

        return update_wrapper(call, function)

    def _call(self, function: RewardFunction, given: dict[str, Any]) -> Rewards:
        """Call the function on all groups. Arguments that are not lists of all completions are not passed on."""
        groups = [columns for columns, _ in chunks(given, self._group_size())]
        try:
            found = list(self._threads.map(partial(self._try_twice, function), groups))
        except BaseException:
            self.close()  # what still runs has no taker
            raise
        return [reward for group, result in zip(groups, found) for reward in self._rewards(function, group, result)]

    def _try_twice(self, function: RewardFunction, group: dict[str, list]) -> Rewards | TimeoutError | Ended:
        """Return the rewards of a group, or why there are none."""
        worker, name = self._idle.get(), name_of(function)
        try:
            for _ in range(2):
                try:
                    rewards = worker.call(self._timeout, function, group)
                    self._has_called, self._deaths[name] = True, -math.inf
                    return rewards
                except TimeoutError as error:
                    self._has_called = True
                    return error
                except Ended as error:
                    ended = error
                    self._has_called |= error.was_called
                    self._deaths[name] += error.was_called
            return ended
        finally:
            self._idle.put(worker)

    def _rewards(self, function: RewardFunction, group: dict[str, list], result: Any) -> Rewards:
        size, name = len(group["prompts"]), function.__qualname__
        if isinstance(result, list):
            return result
        if isinstance(result, TimeoutError):
            return self._without(name, f"took longer than {self._timeout:g} s (reward_timeout)", size)
        if not self._has_called:
            raise ConfigError(
                f"reward_num_workers: the processes for {name} end with exit code {result.exit_code} before they can "
                f"call it, since each has to import it from {function.__module__}; they have printed why. {_GUARD} A "
                "function of a notebook, or of code without a file, must be moved to a module."
            )
        deaths = self._deaths[name_of(function)]
        if deaths >= _DEATHS:
            raise RewardError(
                f"The reward function {name_of(function)} ended its process in each of its {deaths} calls so far (exit "
                f"code {result.exit_code}; a negative one is a signal), so that it gave no reward. Call it with known "
                "completions in a separate script."
            )
        return self._without(name, f"ended its process twice (exit code {result.exit_code})", size)

    def _without(self, name: str, reason: str, size: int) -> Rewards:
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"{name} {reason} for the completions of a prompt, which get no reward from it. This warning is given "
                "once.",
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
