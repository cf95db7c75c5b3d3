"""Signals for a command that other processes carry out: they are collected here and passed on to them."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextmanager
def received_signals() -> Iterator[list[int]]:
    """The numbers of the signals that arrive in the block, in their order, instead of their usual effect."""
    received: list[int] = []

    def note(number: int, _: Any) -> None:
        received.append(number)

    previous = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def passed_on(number: int) -> int:
    """The signal that a training process gets for one that arrived here: it handles SIGINT and SIGTERM."""
    return number if number == signal.SIGINT else signal.SIGTERM
