"""Values of YAML text: YAML 1.2 with plain values, without what parsers read differently."""

import re
from collections.abc import Iterator
from itertools import count
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode

DEEPEST = 100  # levels of nesting in a config
LARGEST = 100_000  # values in a config: nested aliases can describe more than fits in memory
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+$")


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


def problem(error: YAMLError) -> tuple[int | None, str]:
    """The line (counted from 1) and the message of a YAML error."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        words = ", ".join(part for part in (error.context, error.problem) if part)
        return error.problem_mark.line + 1, words
    return None, str(error)
