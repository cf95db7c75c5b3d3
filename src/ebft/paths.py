"""Paths that a user gives: `~` is the home folder, and only regular files are read; and the object in a JSON file."""

import json
import os
from pathlib import Path
from typing import Any

from ebft.errors import EBFTError


def expand_home(path: str) -> str:
    """`path` with a leading `~` replaced with the home folder. Raises ValueError if there is no such user."""
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError(f"the home folder of {path!r} is unknown. Write the full path.")
    return expanded


def exists(path: Path) -> bool:
    """Whether `path` exists; False for names that the system does not accept, such as very long ones."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_free(path: Path, *starts: bytes) -> bool:
    """Whether writing to `path` replaces or extends no file of others: a file there is empty or has one of `starts`."""
    try:
        with path.open("rb") as file:
            begin = file.read(max(map(len, starts)))
    except FileNotFoundError:
        return True
    return not begin or begin.lower().startswith(starts)


def check_regular(path: Path, error: type[EBFTError], name: str) -> None:
    """Raise `error` for a pipe, device or socket, from which reading may never end; `name` describes the path."""
    if exists(path) and not path.is_file() and not path.is_dir():
        raise error(f"{name} is a pipe, a device or a socket. Give a regular file.")


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises OSError if it cannot be read, and ValueError if it does not contain one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError(f"expected an object, got {found!r:.60}")
    return found
