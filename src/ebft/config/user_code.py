"""Errors of user-defined functions: what they raised, and in which file and line of the user's code."""

import linecache
import os
import sysconfig
import traceback
from types import TracebackType

from ebft.errors import cause, shortened

# Anything that user code may raise, including sys.exit(): only Ctrl-C is passed on.
RAISED = (Exception, SystemExit, GeneratorExit)
_LONGEST_LINE = 120
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = tuple(
    {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")}
)


def what_happened(error: BaseException) -> str:
    """What user code raised, and where, on one line: `KeyError: 'text' (own.py, line 4: return row["text"])`."""
    if isinstance(error, SyntaxError) and error.filename:
        line = shortened(error.text or "", _LONGEST_LINE)
        return (
            f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno}{': ' if line else ''}{line})"
        )
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r}){place_of(error)}"
    words = " ".join(cause(error).split())
    named = words if words.startswith(type(error).__name__) else f"{type(error).__name__}: {words}"
    return f"{named}{place_of(error)}"


def place_of(error: BaseException) -> str:
    """The innermost line of the user's own files at which an error was raised, in parentheses, if there is one."""
    found = _users_frame(error.__traceback__)
    if found is None:
        return ""
    file, number = found
    line = shortened(linecache.getline(file, number), _LONGEST_LINE)
    return f" ({file}, line {number}{': ' if line else ''}{line})"


def _users_frame(trace: TracebackType | None) -> tuple[str, int] | None:
    frames = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(trace)]
    own = [(file, number) for file, number in frames if _is_users(file)]
    return own[-1] if own else None


def _is_users(file: str) -> bool:
    path = os.path.realpath(file)
    if path.startswith(_OURS + os.sep) or not os.path.isfile(path):  # compiled code and <string> have no file
        return False
    return not any(path.startswith(library + os.sep) for library in _LIBRARIES)
