"""The folder that fetched files are kept in, and a lock so that one process at a time writes to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from ebft.errors import FetchError


def cache_dir() -> Path:
    """`$EBFT_CACHE`, else `$XDG_CACHE_HOME/ebft`, else `~/.cache/ebft`, as an absolute path; it may not exist yet."""
    own, shared = os.environ.get("EBFT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    folder = Path(own) if own else Path(shared) / "ebft" if shared else Path("~/.cache/ebft")
    return folder.expanduser().absolute()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of `path`, a file `.NAME.lock` beside it; other processes wait. The parent folders are made.

    Raises FetchError where they cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.parent / f".{path.name}.lock")
        lock.acquire()
    except OSError as error:
        raise FetchError(
            f"{path.parent} cannot be written ({error.strerror or error}). Name another cache folder in EBFT_CACHE."
        ) from error
    try:
        yield
    finally:
        lock.release()
