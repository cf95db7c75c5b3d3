"""Processes that call functions; one that crashes or exceeds the time limit is replaced.

Each process imports this module and what its functions need. Nothing here imports PyTorch, which would take every
process seconds and half a gigabyte.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any

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
