"""The keys and values of a YAML file and of overrides (`ebft.stride=4`, `datasets.0.path=notes.txt`), not yet checked.

YAML is read as version 1.2 with plain values, without what parsers read differently.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from ebft.errors import ConfigError, shortened

_SHOWN = 100  # characters of an override in messages


def read_values(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The keys and values of the YAML file at `path` with `overrides`, not yet checked."""
    name = shortened(path, _SHOWN)
    try:
        values = parse_yaml(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        line, words = problem(error)
        where = f"{name}, line {line}" if line else name
        raise ConfigError(f"Cannot read config file {where}: {shortened(words)}.") from None
    if not isinstance(values, dict):
        given = "is empty" if values is None else f"is {values!r:.60}"
        raise ConfigError(f"Config file {name} {given}; expected key: value, with at least base_model and datasets.")
    apply_overrides(values, overrides)
    return values


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Write each `dotted.key=value` into the nested `values`; values are parsed as YAML, an empty one means unset."""
    for override in overrides:
        try:
            key, value = _split(override)
            _assign(values, key.split("."), value)
        except ConfigError as error:
            raise ConfigError(f"Invalid override {shortened(override, _SHOWN)!r}: {error}") from None


def _split(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError("expected key=value, for example ebft.stride=4.")
    if re.match(r"[^\"'\[{|>&*!].*\s#", text.strip()):  # a comment of YAML; on a command line it is a part of the text
        return key, text.strip()
    try:
        return key, parse_yaml(text)
    except YAMLError as error:
        words = shortened(problem(error)[1])
        raise ConfigError(f"the value is not valid YAML: {words}. Quote it: {key:.100}='\"...\"'.") from None


def _assign(values: Any, path: list[str], value: Any) -> None:
    """Follow `path` and set its last part, creating missing sections; an index one past the end adds an element."""
    part, *rest = path
    if not isinstance(values, (dict, list)):
        raise ConfigError(f"cannot set {part!r:.100} in {values!r:.100}, which has no keys.")
    step: Any = part
    if isinstance(values, list):
        if not (part.isascii() and part.isdecimal()) or int(part) > len(values):
            raise ConfigError(f"{part!r:.100} is not a valid index for a list of length {len(values)}, from 0.")
        step = int(part)
        values += [None] * (step == len(values))
    if not rest:
        values[step] = value
        return
    if (values[step] if isinstance(values, list) else values.get(step)) is None:
        values[step] = [] if rest[0].isdecimal() else {}
    _assign(values[step], rest, value)


class _Values(SafeConstructor):
    """Only plain values, without dates, which no key takes."""


_Values.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def parse_yaml(text: str) -> Any:
    """The value of `text`, in which each alias (*name) is a copy of its anchor. Raises YAMLError for any other text."""
    if re.search(r"^%YAML\s+(?!1\.2\b)", text, re.MULTILINE):
        raise YAMLError("configs are read as YAML 1.2, but the %YAML line declares another version: remove it")
    try:
        parser = YAML(typ="safe", pure=True)  # pure: the parser in C reads YAML 1.1
        parser.Constructor = _Values
        return _copied(parser.load(text))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:  # !!int in front of a word
        raise YAMLError(f"a value does not have the type of its tag ({error})") from error
    except RecursionError:
        raise YAMLError("nesting is too deep, or an alias (*name) refers to a value that contains it") from None


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if not isinstance(value, dict):
        return value
    if any(isinstance(key, (tuple, dict)) for key in value):
        raise YAMLError("a key must be a scalar, not a list or a mapping")
    return {key: _copied(item) for key, item in value.items()}


_TAB = r"character '\t' that cannot start any token"  # words of ruamel.yaml


def problem(error: Exception) -> tuple[int | None, str]:
    """The line (counted from 1), if it is known, and the message of an error of a file in YAML."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        words = ", ".join(part for part in (error.context, error.problem) if part)
        return error.problem_mark.line + 1, words.replace(_TAB, "a tab: indent with spaces only")
    return None, str(error)
