"""Calls of user-defined functions: their errors name the function, and the line of the user's file."""

from __future__ import annotations

import linecache
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ebft.errors import EBFTError, cause, shortened

_LONGEST_LINE = 120
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = tuple(
    {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")}
)


@contextmanager
def user_code(
    what: str, error: type[EBFTError], says: Callable[[str], str] | None = None, passes: type[Exception] = EBFTError
) -> Iterator[None]:
    """Context manager for a call of user code, which `what` names: what it raises is raised as `error`. Exceptions that
    `passes` includes stay the same. `says` returns the message, given what happened."""
    try:
        yield
    except passes:
        raise
    except (Exception, SystemExit) as raised:
        happened = what_happened(raised)
        raise error(f"{what} failed: {happened}." if says is None else says(happened)) from raised


def what_happened(error: BaseException) -> str:
    """What user code raised, and where, on one line: `KeyError: 'text' (own.py, line 4: return row["text"])`."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} {_at(error.filename, error.lineno, error.text or '')}"
    place = place_of(error)
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r}){place}"
    words = " ".join(cause(error).split())
    return f"{words}{place}" if words.startswith(type(error).__name__) else f"{type(error).__name__}: {words}{place}"


def place_of(error: BaseException) -> str:
    """The innermost line of the user's own files at which an error was raised, in parentheses, if there is one."""
    frames = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    # Compiled code and <string> have no file.
    own = [(file, number) for file, number in frames if os.path.isfile(file) and is_outside(file)]
    return f" {_at(*own[-1], linecache.getline(*own[-1]))}" if own else ""


def _at(file: str, number: int | None, line: str) -> str:
    line = shortened(line, _LONGEST_LINE)
    return f"({file}, line {number}{': ' if line else ''}{line})"


def is_outside(file: str) -> bool:
    """Whether a file belongs neither to this package nor to Python and the installed packages."""
    path = os.path.realpath(file)
    return not any(path.startswith(folder + os.sep) for folder in (_OURS, *_LIBRARIES))
