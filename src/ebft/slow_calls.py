"""One line on stderr about a call that takes minutes, for calls that may never return and cannot be interrupted."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

FIRST, AGAIN = 60.0, 600.0  # seconds until the first line about a call, and between later ones

_running: set[watched] = set()
_thread: threading.Thread | None = None
_wake = threading.Event()
_asleep_until = 0.0
_starting = threading.Lock()


class watched:  # noqa: N801, since it is used as a function
    """Context manager that prints what has been running since when if the block takes longer than `FIRST` seconds.

    `what` is the subject of the line, such as "The reward function my_rewards.score", or a function that returns it;
    `hint` is a sentence that follows. May be nested, and used in several threads. Costs less than 1 µs: one thread
    watches all calls. It needs the interpreter lock, so there is no line while a call of C code keeps it.
    """

    __slots__ = ("due", "hint", "since", "what")

    def __init__(self, what: str | Callable[[], str], hint: str = "") -> None:
        self.what, self.hint = what, hint
        self.since = self.due = 0.0

    def __enter__(self) -> None:
        self.since = time.monotonic()
        self.due = self.since + FIRST
        _running.add(self)
        if _thread is None:
            _start()
        elif self.due < _asleep_until:  # FIRST was lowered
            _wake.set()

    def __exit__(self, *_: object) -> None:
        _running.discard(self)


def _start() -> None:
    global _thread
    with _starting:
        if _thread is None:
            _thread = threading.Thread(target=_watch, name="slow calls", daemon=True)
            _thread.start()


def _watch() -> None:
    global _asleep_until
    while True:
        now = time.monotonic()
        calls = list(_running)
        for call in calls:
            if call.due <= now:
                call.due = now + AGAIN
                _report(call, now - call.since)
        _asleep_until = min([now + FIRST, *(call.due for call in calls)])  # a later call is not due before
        _wake.wait(max(0.0, _asleep_until - time.monotonic()))
        _wake.clear()


def _report(call: watched, seconds: float) -> None:
    rank = os.environ.get("RANK", "0")
    start = f"Rank {rank}: " if rank != "0" else ""
    try:
        what = call.what if isinstance(call.what, str) else call.what()
        took = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        line = f"{start}{what} has been running for {took}, since {since}. {call.hint}".rstrip() + "\n"
        sys.stderr.write(("\n" if sys.stderr.isatty() else "") + line)  # after an unfinished progress bar
        sys.stderr.flush()
    except Exception:  # stderr is closed, or the interpreter ends
        return


def _after_fork() -> None:
    """In a forked process, the thread and the calls of the other one do not exist."""
    global _thread, _asleep_until, _wake, _starting
    _running.clear()
    _thread, _asleep_until, _wake, _starting = None, 0.0, threading.Event(), threading.Lock()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)
