"""The keys and values of a YAML file and of overrides (`ebft.stride=4`, `datasets.0.path=notes.txt`), not yet checked.

YAML is read as version 1.2 with plain values, without what parsers read differently.
"""

import os
import re
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode

from ebft.errors import ConfigError, shortened
from ebft.files import check_regular

_LARGEST_FILE = 10_000_000  # bytes; a larger file is a data set or a model
_SHOWN = 100  # characters of an override in messages
DEEPEST = 100  # levels of nesting in a config
LARGEST = 100_000  # values in a config: nested aliases can describe more than fits in memory
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+$")


def read_values(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The keys and values of the YAML file at `path` with `overrides`, not yet checked."""
    values = _read(Path(path).expanduser())
    apply_overrides(values, overrides)
    return values


def _read(path: Path) -> dict[str, Any]:
    try:
        check_regular(path, ConfigError, f"Config file {path}")
        size = path.stat().st_size
        if path.is_file() and size > _LARGEST_FILE:
            raise ConfigError(f"Config file {path} has {size:,} bytes. Give the path to a YAML file.")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        name = shortened(path, _SHOWN)
        raise ConfigError(f"Cannot read config file {name}: {error.strerror}. Give the path to a YAML file.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"Config file {path} is not valid UTF-8 ({error.reason}). Save it as UTF-8.") from None
    try:
        values = parse_yaml(text)
    except YAMLError as error:
        line, words = problem(error)
        words = shortened(words)
        where = f"{path}, line {line}" if line else f"{path}"
        raise ConfigError(f"{where}: invalid YAML: {words}.") from None
    if values is None:
        raise ConfigError(f"Config file {path} is empty. At least base_model and datasets are required.")
    if not isinstance(values, dict):
        raise ConfigError(f"Config file {path}, line 1: expected a mapping (key: value), got {values!r:.60}.")
    return values


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Write each `dotted.key=value` into the nested `values`; values are parsed as YAML, an empty one means unset."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides must be a list of strings, not a string. Use [{overrides!r:.100}].")
    for override in overrides:
        key, value = _split(override)
        if not all(key.split(".")):
            raise ConfigError(f"Invalid override {_shown(override)}: a part of the key {key!r:.100} is empty.")
        if key.count(".") >= DEEPEST:
            raise ConfigError(f"Invalid override {_shown(override)}: the key has more than {DEEPEST} parts.")
        _assign(values, key.split("."), value, override)


def _shown(override: str) -> str:
    return repr(shortened(override, _SHOWN))


def _split(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    key = key.strip()
    if key.startswith("-"):
        plain = key.strip("-").replace("-", "_")
        raise ConfigError(
            f"Invalid override {_shown(override)}: overrides are written without dashes: "
            f"{plain:.100}={shortened(text, _SHOWN) or 'VALUE'}."
        )
    if not equals or not key:
        raise ConfigError(f"Invalid override {_shown(override)}; expected key=value, for example ebft.stride=4.")
    if re.match(r"[^\"'\[{|>&*!].*\s#", text.strip()):  # a comment of YAML; on a command line it is a part of the text
        return key, text.strip()
    try:
        return key, parse_yaml(text)
    except YAMLError as error:
        _, words = problem(error)
        raise ConfigError(
            f"Invalid override {_shown(override)}: the value is not valid YAML: {shortened(words)}. "
            f"Quote it: {key:.100}='\"...\"'."
        ) from None


def _assign(values: Any, path: list[str], value: Any, override: str) -> None:
    """Follow `path` and set its last part, creating missing sections."""
    for part, following in zip(path, path[1:]):
        step = _step(values, part, override)
        inner = values[step] if isinstance(values, list) else values.get(step)
        if inner is None:
            inner = [] if following.isascii() and following.isdecimal() else {}
            values[step] = inner
        values = inner
    step = _step(values, path[-1], override)
    values[step] = value


def _step(values: Any, part: str, override: str) -> Any:
    """`part` as a mapping key or a list index. Raises ConfigError if it is neither."""
    if isinstance(values, dict):
        return part
    if not isinstance(values, list):
        raise ConfigError(
            f"Invalid override {_shown(override)}: cannot set {part!r:.100} in {values!r:.100}, which has no keys."
        )
    if not (part.isascii() and part.isdecimal()) or int(part) > len(values):
        raise ConfigError(
            f"Invalid override {_shown(override)}: {part!r:.100} is not a valid index for a list of length "
            f"{len(values)}. Indices start at 0."
        )
    position = int(part)
    if position == len(values):  # one past the end adds an element
        values.append(None)
    return position


class _Values(SafeConstructor):
    """Only plain values, without numbers that parsers read differently and without dates, which no key takes."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            ArithmeticError,
        ) as error:  # for example !!int in front of a word
            given = f"{str(node.value)[:20]!r} " if isinstance(node, ScalarNode) else ""
            words = f"the value {given}does not have the type of its tag {node.tag} ({error})"
            raise ConstructorError(None, None, words, node.start_mark) from error

    def construct_yaml_int(self, node: ScalarNode) -> int:
        text = self.construct_scalar(node)
        if _LEADING_ZERO.match(text):
            words = (
                f"the number {text:.20} is ambiguous, since it is octal in YAML 1.1. Write it without leading zeros "
                f'(or as 0o...), or as text in quotes: "{text:.20}"'
            )
            raise ConstructorError(None, None, words, node.start_mark)
        return super().construct_yaml_int(node)

    def flatten_mapping(self, node: MappingNode) -> Any:
        merged = super().flatten_mapping(node)
        if len(node.value) > LARGEST:
            raise ConstructorError(None, None, f"more than {LARGEST} values, including aliases", node.start_mark)
        return merged


_Values.add_constructor("tag:yaml.org,2002:int", _Values.construct_yaml_int)
_Values.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def parse_yaml(text: str) -> Any:
    """The value of `text`; raises YAMLError if it is malformed, recursive, or has keys that are lists or mappings.

    An alias (*name) becomes a copy of its anchor, so that changing one does not change the other.
    """
    if re.search(r"^%YAML\s+(?!1\.2\b)", text, re.MULTILINE):
        raise YAMLError("configs are read as YAML 1.2, but the %YAML line declares another version: remove it")
    try:
        parser = YAML(typ="safe", pure=True)  # pure: the parser in C reads YAML 1.1
        parser.Constructor = _Values
        value = parser.load(text)
        return _copied(value, (), count(1))
    except ValueError as error:  # for example !!int in front of a word
        raise YAMLError(str(error)) from error
    except RecursionError:
        raise YAMLError("nesting is too deep") from None


def _copied(value: Any, parents: tuple[int, ...], counter: Iterator[int]) -> Any:
    if next(counter) > LARGEST:
        raise YAMLError(f"more than {LARGEST} values, including aliases")
    if isinstance(value, str):
        _check_text(value)
    if not isinstance(value, (dict, list)):
        return value
    if id(value) in parents:
        raise YAMLError("an alias (*name) refers to a value that contains it")
    if len(parents) >= DEEPEST:
        raise YAMLError(f"nesting is too deep (more than {DEEPEST} levels)")
    parents = (*parents, id(value))
    if isinstance(value, list):
        return [_copied(item, parents, counter) for item in value]
    if any(isinstance(key, (tuple, dict)) for key in value):
        raise YAMLError("a key must be a scalar, not a list or a mapping")
    for key in value:
        _check_text(str(key))
    return {key: _copied(item, parents, counter) for key, item in value.items()}


def _check_text(text: str) -> None:
    if "\0" in text:
        raise YAMLError(f"the text {text!r:.60} contains a NUL character")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise YAMLError(f"the text {text!r:.60} contains half of a surrogate pair, which is not a character")


_TAB = r"character '\t' that cannot start any token"  # words of ruamel.yaml


def problem(error: YAMLError) -> tuple[int | None, str]:
    """The line (counted from 1) and the message of a YAML error."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        words = ", ".join(part for part in (error.context, error.problem) if part)
        return error.problem_mark.line + 1, words.replace(_TAB, "a tab: indent with spaces only")
    return None, str(error)
