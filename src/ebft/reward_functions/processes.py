"""Processes that call functions; one that crashes or exceeds the time limit is replaced.

Each process imports this module and what its functions need. Nothing here imports PyTorch, which would take every
process seconds and half a gigabyte.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import update_wrapper
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any

from ebft.errors import ConfigError, RewardError
from ebft.reward_functions.calls import name_of, outcome, split

NAME = "ebft reward function"  # of the processes
_SPAWN = multiprocessing.get_context("spawn")  # forked copies of a process that has threads can deadlock
_GRACE = 3.0  # seconds in which a process has to end before it is killed
_POLL = 1.0  # seconds; the end of a process is not reported if children of it keep its connection open


@dataclass(frozen=True)
class Expired:
    """Takes the place of a result: the process ended with `exit_code`, or at the time limit if that is None.

    was_called: False if it ended before it called the function, for example because it could not import it.
    """

    exit_code: int | None
    was_called: bool = True


class Processes:
    """`count` processes, started when they are needed. Each calls functions in its main thread, one at a time.

    Programs that a function has started end with its process. `timeout` is the time limit of a call in seconds, or
    None. It does not include imports.
    """

    def __init__(self, count: int, timeout: float | None) -> None:
        self._all = [_Process(timeout) for _ in range(count)]
        self._lock = threading.Lock()
        # Priorities of 0 and above run before the interpreter waits for its processes.
        self.close = Finalize(self, _close, args=(self._all,), exitpriority=0)

    def map(self, function: Callable[..., Any], calls: list[tuple]) -> list[Any]:
        """The results of `function(*arguments)` in the order of `calls`, with Expired for those that have none.

        The function must not raise: an exception ends its process. Raises RuntimeError after `close`.
        """
        results: list[Any] = [None] * len(calls)
        waiting, busy = deque(enumerate(calls)), dict[_Process, int]()
        with self._lock:
            idle = list(self._all)
            try:
                while waiting or busy:
                    while waiting and idle:
                        index, arguments = waiting.popleft()
                        busy[idle[-1]] = index
                        idle.pop().call(function, arguments)
                    _wait(busy)
                    for process in list(busy):
                        if outcome := process.outcome():
                            results[busy.pop(process)] = outcome[0]
                            idle.append(process)
            finally:
                _stop(busy)  # after an error: nobody takes their results
        return results


class _Process:
    """A process and the connection to it.

    The process sends None when it waits for a call, None again when it has imported what the call needs, and then a
    tuple with the result.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout = math.inf if timeout is None else timeout
        self._process: Any = None
        self._unsent: bytes | None = None
        self._was_called = False
        self._has_call = False  # still true after an interruption, when a result may come that nobody waits for
        self.is_closed = False
        self.connection: Connection
        self.deadline = math.inf

    def call(self, function: Callable[..., Any], arguments: tuple) -> None:
        self._unsent = pickle.dumps((function, arguments))
        if self._has_call:
            self.stop()
        if self._process is None or not self._process.is_alive():
            self._start()
        self._has_call, self._was_called, self.deadline = True, False, math.inf

    def outcome(self) -> tuple[Any] | None:
        """A tuple with the result or Expired, or None while there is none."""
        try:
            while self.connection.poll():
                if (message := self.connection.recv()) is not None:
                    self._has_call = False
                    return message
                if self._unsent is None:
                    self._was_called, self.deadline = True, time.monotonic() + self._timeout
                else:
                    call, self._unsent = self._unsent, None
                    self.connection.send_bytes(call)
        except (EOFError, OSError):
            return (Expired(self.stop(_GRACE), self._was_called),)
        process = self._process
        if process is None or (not process.is_alive() and not self.connection.poll()):
            return (Expired(self.stop(), self._was_called),)
        if time.monotonic() > self.deadline:
            _stop([self])
            return (Expired(None),)
        return None

    def terminate(self) -> None:
        if (process := self._process) is not None and not _signal_group(process, signal.SIGTERM):
            process.terminate()  # it has no group yet

    def stop(self, grace: float = 0.0) -> int | None:
        """Give the process `grace` seconds to end, kill it if it has not, and return its exit code."""
        if (process := self._process) is None:
            return None
        process.join(grace)
        if process.is_alive():
            process.kill()
            process.join()
        _signal_group(process, signal.SIGKILL)  # programs that it started
        self._process, self._has_call = None, False
        self.connection.close()
        return process.exitcode

    def _start(self) -> None:
        if self.is_closed:
            raise RuntimeError("The processes are closed.")
        self.stop()
        self.connection, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_serve, args=(theirs,), name=NAME)
        try:
            process.start()
        finally:
            theirs.close()  # so that the connection ends with the process
        self._process = process


def _signal_group(process: Any, number: int) -> bool:
    """Send a signal to a process and to the programs that it started; False if there is no such group."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):  # the latter on macOS, if all of them have ended
        return False
    return True


def _wait(busy: Collection[_Process]) -> None:
    """Wait until a process has sent something or ended, or the time limit of one is reached."""
    left = min(process.deadline for process in busy) - time.monotonic()
    with contextlib.suppress(OSError):  # of a connection that another thread has closed, which outcome() notices
        wait([process.connection for process in busy], timeout=max(0.0, min(left, _POLL)))


def _stop(processes: Collection[_Process]) -> None:
    for process in processes:
        process.terminate()
    end = time.monotonic() + _GRACE
    for process in processes:
        process.stop(max(0.0, end - time.monotonic()))


def _close(processes: Collection[_Process]) -> None:
    for process in processes:
        process.is_closed = True
    _stop(processes)


def _serve(connection: Connection) -> None:
    """The life of a process, which ends with the one that started it."""
    # A group of its own, so that programs that it starts can be ended with it. Ctrl-C in a terminal is not sent to it,
    # but schedulers send SIGINT to all processes of a job. The programs do not inherit a handler.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, lambda *_: None)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    own_id = os.getpid()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            connection.send(None)
            function, arguments = pickle.loads(connection.recv_bytes())  # imports the module of the function
            connection.send(None)
            result = function(*arguments)
            if os.getpid() != own_id:  # a copy that the function forked
                os._exit(0)
            connection.send((result,))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


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
