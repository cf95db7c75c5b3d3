"""YAML 1.2 for configs: 1e-5 is a number, `no` is a string, a duplicate key is an error."""

from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError


def parse_yaml(text: str) -> Any:
    """Parse `text`. Raises YAMLError if it is malformed or recursive, or if a key is a list or a mapping."""
    try:
        value = YAML(typ="safe", pure=True).load(text)  # pure: the parser in C reads YAML 1.1
        _check_tree(value, ())
    except ValueError as error:  # a date that does not exist, or !!int before a word
        raise YAMLError(str(error)) from error
    except RecursionError:
        raise YAMLError("nesting is too deep") from None
    return value


def _check_tree(value: Any, parents: tuple[int, ...]) -> None:
    if not isinstance(value, (dict, list)):
        return
    if id(value) in parents:
        raise YAMLError("an alias (*name) refers to a value that contains it")
    if isinstance(value, dict) and any(isinstance(key, (tuple, dict)) for key in value):
        raise YAMLError("a key must be a scalar, not a list or a mapping")
    for item in value.values() if isinstance(value, dict) else value:
        _check_tree(item, (*parents, id(value)))


def problem(error: YAMLError) -> tuple[int | None, str]:
    """The line (counted from 1) and the message of a YAML error."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        words = ", ".join(part for part in (error.context, error.problem) if part)
        return error.problem_mark.line + 1, words
    return None, str(error)
