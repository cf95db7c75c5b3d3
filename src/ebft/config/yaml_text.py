"""YAML 1.2 for configs: 1e-5 is a number, `no` is a string, a duplicate key is an error."""

import re
from collections.abc import Iterator
from itertools import count
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

LARGEST = 100_000  # values in a config: nested aliases can describe more than fits in memory


def parse_yaml(text: str) -> Any:
    """The value of `text`; raises YAMLError if it is malformed, recursive, or has keys that are lists or mappings.

    An alias (*name) becomes a copy of its anchor, so that changing one does not change the other.
    """
    if re.search(r"^%YAML\s+(?!1\.2\b)", text, re.MULTILINE):
        raise YAMLError("configs are read as YAML 1.2, but the %YAML line declares another version: remove it")
    try:
        value = YAML(typ="safe", pure=True).load(text)  # pure: the parser in C reads YAML 1.1
        return _copied(value, (), count(1))
    except ValueError as error:  # a date that does not exist, or !!int in front of a word
        raise YAMLError(str(error)) from error
    except RecursionError:
        raise YAMLError("nesting is too deep") from None


def _copied(value: Any, parents: tuple[int, ...], counter: Iterator[int]) -> Any:
    if next(counter) > LARGEST:
        raise YAMLError(f"more than {LARGEST} values, including aliases")
    if not isinstance(value, (dict, list)):
        return value
    if id(value) in parents:
        raise YAMLError("an alias (*name) refers to a value that contains it")
    parents = (*parents, id(value))
    if isinstance(value, list):
        return [_copied(item, parents, counter) for item in value]
    if any(isinstance(key, (tuple, dict)) for key in value):
        raise YAMLError("a key must be a scalar, not a list or a mapping")
    return {key: _copied(item, parents, counter) for key, item in value.items()}


def problem(error: YAMLError) -> tuple[int | None, str]:
    """The line (counted from 1) and the message of a YAML error."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        words = ", ".join(part for part in (error.context, error.problem) if part)
        return error.problem_mark.line + 1, words
    return None, str(error)
