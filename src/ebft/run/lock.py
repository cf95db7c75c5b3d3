"""A lock that lets one run at a time use an output folder."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ebft.dashboard.run import read_run, state_of
from ebft.errors import ConfigError

LOCK = ".ebft.lock"


@contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """Hold the lock of `output_dir` on the main process; the operating system releases it when the process dies.

    Raises ConfigError if another run holds it. A file system without locks is a warning: a lock that is only a file, as
    filelock would use there, remains when a process is killed, and then keeps every later run on other machines out.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    lock = FileLock(output_dir / LOCK, fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"output_dir: {output_dir} is used by another run{_owner(output_dir)}. Wait until it has ended, or "
            "choose another folder."
        ) from None
    except (OSError, NotImplementedError) as error:
        warnings.warn(
            f"output_dir: {output_dir} cannot be locked ({error}), so another run in the same folder would not be "
            "detected.",
            stacklevel=3,
        )
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):  # user code closed the file
            lock.release()


def wait_until_free(output_dir: Path, seconds: float) -> None:
    """Wait for a run that is being killed to release the lock of `output_dir`, for at most `seconds`."""
    lock = FileLock(output_dir / LOCK, fallback_to_soft=False)
    with suppress(Timeout, OSError, NotImplementedError):  # reported by `locked`
        lock.acquire(timeout=seconds)
        lock.release()


def _owner(output_dir: Path) -> str:
    run = read_run(output_dir)
    return f" (process {run.get('pid')} on {run.get('host')})" if state_of(run) == "running" else ""
