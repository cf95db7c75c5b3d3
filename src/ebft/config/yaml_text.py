"""YAML as a config wants it: 1e-5 is a number, `no` is a word, a repeated key is an error."""

import re
from typing import Any

import yaml

_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|nan)$")
_BOOL = re.compile(r"^(true|True|TRUE|false|False|FALSE)$")
_FLOAT_TAG, _BOOL_TAG = "tag:yaml.org,2002:float", "tag:yaml.org,2002:bool"


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the numbers and booleans of YAML 1.2, and without repeated keys."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_FLOAT_TAG, _BOOL_TAG)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be one word, not a list or a mapping", key_node.start_mark
                )
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} is repeated; keep one", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(_FLOAT_TAG, _FLOAT, list("-+0123456789."))
_Loader.add_implicit_resolver(_BOOL_TAG, _BOOL, list("tTfF"))


def parse_yaml(text: str) -> Any:
    """The value that `text` spells; yaml.YAMLError where it is malformed."""
    try:
        value = yaml.load(text, Loader=_Loader)  # noqa: S506 - a subclass of the safe loader
        _refuse_cycles(value, ())
    except ValueError as error:  # a date that does not exist, or !!int in front of a word
        raise yaml.YAMLError(str(error)) from error
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    return value


def _refuse_cycles(value: Any, parents: tuple[int, ...]) -> None:
    """An alias inside its own anchor makes a value without end."""
    if not isinstance(value, (dict, list)):
        return
    if id(value) in parents:
        raise yaml.YAMLError("an alias (*name) stands inside the value that it repeats")
    for item in value.values() if isinstance(value, dict) else value:
        _refuse_cycles(item, (*parents, id(value)))


def problem(error: yaml.YAMLError) -> tuple[int | None, str]:
    """The line (counted from 1) and the words of a YAML error."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        words = ", ".join(part for part in (error.context, error.problem) if part)
        return error.problem_mark.line + 1, words
    return None, str(error)
