"""Functions that a config names by `module.function`: finding them, what they accept, their source and errors."""

from __future__ import annotations

import ast
import importlib
import inspect
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

from ebft.errors import ConfigError, EBFTError, cause, shortened


def search_folders(*folders: str) -> None:
    """Look user-defined modules up in these folders too, after all others on Python's path."""
    sys.path.extend(folder for folder in folders if folder not in sys.path)


def find_function(key: str, name: str, error: type[EBFTError] = ConfigError, hint: str = "") -> Callable[..., Any]:
    """The function `name` (`module.function`), given by `key` of a config. Raises `error`, with `hint`, if not found.
    Modules are looked up on Python's path, in the working directory, and in the folder of the config; importing one
    runs its code."""
    module, _, function = name.rpartition(".")
    if not all(name.split(".")) or not module:
        raise error(f"{key}: unknown name {name!r:.100}. Custom functions are written as module.function.{hint}")
    search_folders(os.getcwd())
    what = f"{key}: importing {module!r} for {name!r} from {os.getcwd()}, the folder of the config or PYTHONPATH failed"
    with user_code(what, error, lambda happened: f"{what}: {happened}{hint if 'NotFound' in happened else ''}"):
        found = importlib.import_module(module)
        value = getattr(found, function, None)  # not of vars: a module can import its parts when they are used
    if not callable(value):
        own = lambda value: callable(value) and getattr(value, "__module__", None) == module
        there = [each for each, value in vars(found).items() if own(value) and not each.startswith("_")]
        raise no_function(key, name, module, function, there, error)
    return value


def with_plugin_args(values: dict[str, Any], unknown: set[str]) -> dict[str, Any]:
    """A config whose `unknown` keys are in `plugin_args` if one of its plugins declares them with `get_input_args`.
    Raises ConfigError if such a plugin cannot be imported or created, or if a value is invalid."""
    names, given = values.get("plugins"), values.get("plugin_args") or {}
    if not unknown or not isinstance(names, list) or not isinstance(given, dict):
        return values
    own: dict[str, Any] = {}
    for name in names:
        if isinstance(name, str) and not name.startswith("axolotl."):
            found = find_function("plugins", name)
            if inspect.isclass(found) and hasattr(found, "get_input_args"):
                with user_code(f"plugins: creating {name} without arguments", ConfigError):
                    plugin = found()
                declared = plugin_values(name, plugin, {**given, **{key: values[key] for key in unknown}})
                own |= {key: values[key] for key in unknown if key in declared}
    rest = {key: value for key, value in values.items() if key not in own}
    return rest | {"plugin_args": {**given, **own}} if own else values


def plugin_values(name: str, plugin: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The keys that plugin `name` declares with `get_input_args`, with their values among the `given` ones. Raises
    ConfigError for an invalid value, or if the declaration is no pydantic.BaseModel."""
    if not hasattr(plugin, "get_input_args"):
        return {}
    what = f"plugins: {name}.get_input_args"
    with user_code(what, ConfigError):
        path = plugin.get_input_args()
    if path is None:
        return {}
    declared = find_function(what, path) if isinstance(path, str) else path
    with user_code(what, ConfigError):
        known = {key: value for key, value in given.items() if key in declared.model_fields}
        return declared.model_validate(known).model_dump()


def no_function(
    key: str, name: str, module: str, function: str, there: Iterable[str], error: type[EBFTError]
) -> EBFTError:
    """The error for a module without the function; `there` lists the functions that it has."""
    known = ", ".join(there) or "none"
    return error(f"{key}: {name!r}: module {module} has no function {function!r}. Available functions: {known}.")


def module_sources(names: Iterable[str]) -> dict[str, str]:
    """The source of each of these modules, and of the modules that they import, unless they are installed packages."""
    sources: dict[str, str] = {}
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        path = _file_of(name)
        if name in sources or path is None:
            continue
        content = path.read_bytes()
        sources[name] = content.decode("utf-8-sig", errors="backslashreplace")
        if path.suffix == ".py":
            for other in _imported(content, name, path):
                # By its file, since a local file may have a name of Python's library; first the package, which
                # is imported to find a part of it.
                top = _file_of(other.partition(".")[0])
                file = None if top is not None and not is_outside(str(top)) else _file_of(other)
                waiting += [other] if file is not None and is_outside(str(file)) else []
    return sources


def _file_of(name: str) -> Path | None:
    loaded = sys.modules.get(name)
    try:
        origin = loaded.__file__ if isinstance(loaded, ModuleType) else find_spec(name).origin
    except (ImportError, AttributeError, ValueError):  # no such module, or one without a file
        return None
    path = Path(origin) if origin else None
    return path if path is not None and path.is_file() else None


def _imported(source: bytes, name: str, path: Path) -> Iterator[str]:
    """The names of the modules that a source imports; some may be functions. A source with a syntax error has none."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):  # a module that is not imported when the transform runs
        return
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):  # of a relative name in a module that is in no package
                base = resolve_name("." * node.level + (node.module or ""), package)
                yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


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
