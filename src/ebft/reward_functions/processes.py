"""Processes that call functions; one that crashes or exceeds the time limit is replaced.

Each process imports this module and what its functions need. Nothing here imports PyTorch, which would take every
process seconds and half a gigabyte.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any

_SPAWN = multiprocessing.get_context("spawn")  # forked copies of a process that has threads can deadlock
_GRACE = 3.0  # seconds in which a process has to end before it is killed
_POLL = 1.0  # seconds; the end of a process is not reported if children of it keep its connection open


@dataclass(frozen=True)
class Expired:
    """Takes the place of a result: the process ended with `exit_code`, or at the time limit if that is None."""

    exit_code: int | None


class Processes:
    """`count` processes, started when they are needed. Each calls functions in its main thread, one at a time.

    `timeout` is the time limit of a call in seconds, or None. It does not include imports.
    """

    def __init__(self, count: int, timeout: float | None) -> None:
        self._all = [_Process(timeout) for _ in range(count)]
        self._lock = threading.Lock()
        # Priorities of 0 and above run before the interpreter waits for its processes.
        self.close = Finalize(self, _stop, args=(self._all,), exitpriority=0)

    def map(self, function: Callable[..., Any], calls: list[tuple]) -> list[Any]:
        """The results of `function(*arguments)` in the order of `calls`, with Expired for those that have none.

        The function must not raise: an exception ends its process.
        """
        results: list[Any] = [None] * len(calls)
        waiting, busy = deque(enumerate(calls)), dict[_Process, int]()
        with self._lock:
            idle = list(self._all)
            try:
                while waiting or busy:
                    while waiting and idle:
                        index, arguments = waiting.popleft()
                        idle[-1].call(function, arguments)
                        busy[idle.pop()] = index
                    _wait(busy)
                    for process in list(busy):
                        if outcome := process.outcome():
                            results[busy.pop(process)] = outcome[0]
                            idle.append(process)
            finally:
                _stop(busy)  # after an error: nobody takes their results
        return results


class _Process:
    """A process and the connection to it. It sends None when it starts a call, and a tuple with the result."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = math.inf if timeout is None else timeout
        self._process: Any = None
        self.connection: Connection
        self.deadline = math.inf

    def call(self, function: Callable[..., Any], arguments: tuple) -> None:
        if self._process is None or not self._process.is_alive():
            self._start()
        self.deadline = math.inf
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # then it has ended, which outcome() returns
            self.connection.send((function, arguments))

    def outcome(self) -> tuple[Any] | None:
        """A tuple with the result or Expired, or None while there is none."""
        try:
            while self.connection.poll():
                if (message := self.connection.recv()) is not None:
                    return message
                self.deadline = time.monotonic() + self._timeout
        except (EOFError, ConnectionResetError):
            return (Expired(self.stop(_GRACE)),)
        if not self._process.is_alive() and not self.connection.poll():
            return (Expired(self.stop()),)
        if time.monotonic() > self.deadline:
            self.stop()
            return (Expired(None),)
        return None

    def stop(self, grace: float = 0.0) -> int | None:
        """End the process, after `grace` seconds in which it may end by itself, and return its exit code."""
        if self._process is None:
            return None
        self._process.join(grace)
        for end in (self._process.terminate, self._process.kill):
            if self._process.is_alive():
                end()
                self._process.join(_GRACE)
        code, self._process = self._process.exitcode, None
        self.connection.close()
        return code

    def _start(self) -> None:
        self.stop()
        self.connection, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(theirs,), name="ebft reward function")
        self._process.start()
        theirs.close()  # so that the connection ends with the process


def _wait(busy: dict[_Process, int]) -> None:
    """Wait until a process has sent something or ended, or the time limit of one is reached."""
    left = min(process.deadline for process in busy) - time.monotonic()
    wait([process.connection for process in busy], timeout=max(0.0, min(left, _POLL)))


def _stop(processes: Any) -> None:
    for process in processes:
        process.stop()


def _serve(connection: Connection) -> None:
    """The life of a process. It ends with the connection, so with the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is sent to this process, too
    while True:
        try:
            call = connection.recv_bytes()
        except (EOFError, OSError):
            return
        function, arguments = pickle.loads(call)  # imports the module of the function
        connection.send(None)
        connection.send((function(*arguments),))
