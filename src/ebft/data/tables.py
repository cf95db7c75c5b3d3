"""`Dataset.map` without what it leaves behind: neither processes nor files, and Ctrl-C is not taken for an error."""

import errno
import os
import shutil
import signal
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import datasets.config
import multiprocess  # of datasets, which starts its processes with it
from datasets import Dataset
from datasets.exceptions import DatasetGenerationError
from filelock import FileLock, Timeout

from ebft.errors import DataError, cause, doing

_CONNECTION_LOST = (EOFError, ConnectionError, multiprocess.TimeoutError)
_DIED = "abruptly died"  # in the message of datasets for a worker that was killed
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PREFIX, _LOCK = "ebft-rows-", "lock"
_locks: list[FileLock] = []  # held until the end of the process
_is_forking = False


def map_rows(rows: Dataset, function: Callable[..., Any], name: str = "datasets", **options: Any) -> Dataset:
    """`rows.map`, with its result in a temporary file until `discard_tables` or the process ends; `name` is for errors.

    In its cache, the library would keep the result for ever. It would not be read again: the key of a result does not
    contain the helper functions of a transform.
    """
    if not options.get("keep_in_memory"):
        options.setdefault("cache_file_name", _temporary_file())
    options.setdefault("new_fingerprint", uuid.uuid4().hex)  # otherwise a hash of the pickled tokenizer and rows
    options.setdefault("writer_batch_size", rows_at_once(rows))
    with forked_processes(name):
        return rows.map(function, load_from_cache_file=False, **options)


def rows_at_once(rows: Dataset) -> int:
    """The number of rows that are in memory together: up to 1,000, of about 64 MiB."""
    return max(1, min(1000, 2**26 * rows.data.num_rows // max(1, rows.data.nbytes)))


def shuffle_rows(rows: Dataset, seed: int) -> Dataset:
    """`rows.shuffle`, whose order is in a temporary file."""
    return rows.shuffle(seed=seed, load_from_cache_file=False, indices_cache_file_name=_temporary_file())


def discard_tables(rows: Dataset) -> None:
    """Delete the temporary files of rows that are not read again; files of the user and of the cache are left."""
    for file in rows.cache_files:
        if Path(file["filename"]).parent == _folder(os.getpid()):
            with suppress(OSError):  # on Windows, files that are open cannot be deleted
                os.unlink(file["filename"])


def _temporary_file() -> str:
    return str(_folder(os.getpid()) / f"{uuid.uuid4().hex}.arrow")


@cache
def _folder(process: int) -> Path:
    """The folder of the temporary files of this process, beside the cache: /tmp may be small, or in memory. It is
    deleted at the end of the process, and folders of killed processes, which hold no lock, are deleted here."""
    base = Path(datasets.config.HF_DATASETS_CACHE)
    base.mkdir(parents=True, exist_ok=True)
    with FileLock(base / f".{_PREFIX}{_LOCK}"):
        for left in base.glob(f"{_PREFIX}*"):
            with suppress(OSError, Timeout), FileLock(left / _LOCK).acquire(timeout=0):
                shutil.rmtree(left, ignore_errors=True)
        folder = Path(mkdtemp(prefix=_PREFIX, dir=base))
        lock = FileLock(folder / _LOCK)
        lock.acquire()
    _locks.append(lock)
    # Not in a forked process.
    weakref.finalize(lock, lambda: os.getpid() == process and shutil.rmtree(folder, ignore_errors=True))
    return folder


@contextmanager
def forked_processes(name: str = "datasets") -> Iterator[None]:
    """Context manager in which forked processes end at SIGTERM, and with the block, and ignore SIGINT.

    A pool ends its idle workers with SIGTERM and waits for them. A handler in Python, such as the one of `ebft train`,
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
    except Exception as error:
        reasons: list[BaseException] = [error]  # and those during whose handling it was raised
        while reasons[-1].__context__ is not None:
            reasons.append(reasons[-1].__context__)
        interruption = next((reason for reason in reasons if isinstance(reason, KeyboardInterrupt)), None)
        if interruption is not None:
            raise interruption from None
        full = next((each for each in reasons if isinstance(each, OSError) and each.errno in _FULL), None)
        if full is not None:
            raise DataError(
                f"The rows cannot be written to {datasets.config.HF_DATASETS_CACHE} ({cause(full)}). Free disk space, "
                "or set the variable HF_DATASETS_CACHE to a folder on another disk."
            ) from error
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


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Context manager that says what is read in errors, with the words of the parser and not of datasets."""
    with doing(f"reading {what}"):
        try:
            yield
        except DatasetGenerationError as error:
            raise (error.__cause__ or error) from None


def _after_fork_in_child() -> None:
    if _is_forking:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork_in_child)
