"""The folder of fetched files, and a lock that lets one process at a time write to it."""

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
    return expanded(folder)


def expanded(path: Path) -> Path:
    """The absolute path, with `~` replaced by the home folder. Raises FetchError if there is no such user."""
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise FetchError(f"{path} begins with the home folder of an unknown user. Correct the path.") from error


@contextmanager
def locked(path: Path, in_cache: bool = True) -> Iterator[None]:
    """Hold the lock of `path`, a file `.NAME.lock` next to it; other processes wait. Parent folders are created.

    Raises FetchError if they cannot be written; `in_cache` says whether the user can choose another cache instead.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.parent / f".{path.name}.lock")
        lock.acquire()
    except OSError as error:
        remedy = "Set EBFT_CACHE to another cache folder." if in_cache else "Choose another folder."
        raise FetchError(f"Cannot write to {path.parent} ({error.strerror or error}). {remedy}") from error
    try:
        yield
    finally:
        lock.release()
