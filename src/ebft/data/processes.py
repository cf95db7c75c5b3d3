"""The processes in which `Dataset.map` runs a transform: none is left behind, and Ctrl-C is not taken for an error."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import multiprocess  # of datasets, which starts its processes with it

from ebft.errors import DataError, EBFTError

_CONNECTION_LOST = (EOFError, ConnectionError, multiprocess.TimeoutError)
_DIED = "abruptly died"  # in the message of datasets for a worker that was killed
_is_forking = False
_forking = threading.local()  # mask: the signals that the thread blocked before it forked


@contextmanager
def forked_processes(name: str = "datasets") -> Iterator[None]:
    """Context manager in which forked processes end at SIGTERM, and with the block, and ignore SIGINT.

    A pool ends its idle workers with SIGTERM and waits for them. A handler in Python, such as that of `ebft train`,
    only runs once the worker's wait for a lock is interrupted, so for a signal that arrives just before it, never.
    Ctrl-C reaches all processes; this one ends the others.

    An interruption of this process is raised instead of the errors of the pool that follow from it. Raises DataError if
    a process died, with `name` for what it was doing.
    """
    global _is_forking
    before, was_forking = set(multiprocess.active_children()), _is_forking
    _is_forking = True
    try:
        yield
    except EBFTError:
        raise
    except Exception as error:
        reasons = list(_reasons(error))
        interruption = next((reason for reason in reasons if isinstance(reason, KeyboardInterrupt)), None)
        if interruption is not None:
            raise interruption from None
        if isinstance(error, _CONNECTION_LOST) or any(_DIED in str(reason) for reason in reasons):
            raise DataError(
                f"{name}: a process that prepared the data ended without an exception: it crashed in C code, called "
                "os._exit(), or was killed, for example because memory ran out. Reduce dataset_num_proc; with 1, the "
                "crash of a transform prints the line at which it happened."
            ) from error
        raise
    finally:
        _is_forking = was_forking
        for process in set(multiprocess.active_children()) - before:  # a second Ctrl-C left them; Python would wait
            process.kill()


def _reasons(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those during whose handling it was raised."""
    while error is not None:
        yield error
        error = error.__context__


def _before_fork() -> None:
    if _is_forking:  # a signal that arrives before the new process has its own handlers waits until it has
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))


def _after_fork_in_child() -> None:
    if "mask" in _forking.__dict__:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _after_fork()


def _after_fork() -> None:
    if "mask" in _forking.__dict__:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.__dict__.pop("mask"))


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child, after_in_parent=_after_fork)
