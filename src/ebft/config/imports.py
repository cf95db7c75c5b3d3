"""User-defined functions, referenced in a config as `module.function`."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from ebft.config.user_code import user_code
from ebft.errors import ConfigError, EBFTError


def find_function(key: str, name: str, error: type[EBFTError] = ConfigError, hint: str = "") -> Callable[..., Any]:
    """The function `name` (`module.function`), given by `key` of a config. Raises `error`, with `hint`, if not found.

    Modules are looked up on Python's path and in the working directory; importing one runs its code.
    """
    module, _, function = name.rpartition(".")
    if not all(name.split(".")) or not module:
        raise error(f"{key}: unknown name {name!r:.100}. Custom functions are written as module.function.{hint}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        with user_code(f"{key}: importing {module!r} for {name!r}", error, sets_up=True):
            found = importlib.import_module(module)
    except EBFTError as problem:
        failure = problem.__cause__
        if not isinstance(failure, ModuleNotFoundError) or not f"{module}.".startswith(f"{failure.name}."):
            raise
        raise error(
            f"{key}: {name!r} refers to function {function!r} of module {module!r}, but the module was not found in "
            f"{os.getcwd()} or in the installed packages. Run the command in the folder of {module.partition('.')[0]}, "
            f"or add that folder to PYTHONPATH.{hint}"
        ) from failure
    if not callable(vars(found).get(function)):
        raise no_function(key, name, module, function, _functions(found), error)
    return vars(found)[function]


def call_problem(function: Callable[..., Any], call: str, *args: str, **kwargs: Any) -> str | None:
    """Why `function` cannot be called with the arguments, as the end of a sentence about `call`; None if it can.

    Also None for what does not tell its arguments, such as functions that are written in C.
    """
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return f"cannot be called as {call}: {error}"
    except ValueError:
        return None
    return None


def no_function(
    key: str, name: str, module: str, function: str, there: Iterable[str], error: type[EBFTError]
) -> EBFTError:
    """The error for a module without the function; `there` lists the functions that it has."""
    known = ", ".join(there) or "none"
    return error(f"{key}: {name!r}: module {module} has no function {function!r}. Available functions: {known}.")


def _functions(module: ModuleType) -> list[str]:
    """The public functions that a module defines itself."""
    own = lambda value: callable(value) and getattr(value, "__module__", None) == module.__name__
    return [name for name, value in vars(module).items() if own(value) and not name.startswith("_")]
