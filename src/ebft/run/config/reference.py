"""The schema as rows of text, for help, the reference page and the tests."""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ebft.config.validation_errors import model_at, section_of
from ebft.methods.base_config import MethodKeys
from ebft.run.config.schema import GROUPS, RunConfig

_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


class Option(NamedTuple):
    """One key of the config as text."""

    key: str
    type: str
    default: str
    description: str


def option_groups() -> dict[str, list[Option]]:
    """The keys of each group and of its sections, in order; sections of the method are separate groups."""
    groups: dict[str, list[Option]] = {}
    for title, model in GROUPS.items():
        for option in _options(model, ""):
            section = option.key.partition(".")[0] if model is MethodKeys and "." in option.key else None
            groups.setdefault(f"Section {section}" if section else title, []).append(option)
    return groups


def choices_of(key: str) -> list[str]:
    """The values of a dotted key that is an enumeration or a boolean. Empty for others."""
    return list(dict.fromkeys(_choices(_annotation(key))))


def takes_text(key: str) -> bool:
    """Whether any text can be the value of a dotted key, beside its `choices_of`."""
    return str in get_args(_annotation(key))


def _annotation(key: str) -> Any:
    *path, name = key.split(".")
    owner = model_at(RunConfig, tuple(int(part) if part.isdecimal() else part for part in path))
    return owner.model_fields[name].annotation if owner and name in owner.model_fields else None


def _choices(annotation: Any) -> Iterator[str]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is bool:
        yield from ("true", "false")
    elif origin is Literal:
        yield from (_spelled(argument) for argument in arguments)
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            yield from _choices(argument)
    elif origin is Annotated:
        yield from _choices(arguments[0])


def _options(model: type[BaseModel], prefix: str) -> Iterator[Option]:
    for name, info in model.model_fields.items():
        section = section_of(info.annotation)
        if section is None:
            bounds = _bounds(info.metadata)
            kind = _type_name(info.annotation) + (f" ({bounds})" if bounds else "")
            yield Option(prefix + name, kind, _default(info), info.description or "")
            continue
        is_list = get_origin(info.annotation) is list
        if is_list:
            yield Option(prefix + name, "list of entries", _default(info), info.description or "")
        yield from _options(section, f"{prefix}{name}.{'N.' if is_list else ''}")


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_name(argument) for argument in arguments if argument is not type(None))
    if origin is Annotated:
        bounds = _bounds(argument for info in arguments[1:] for argument in info.metadata)
        return _type_name(arguments[0]) + (f" ({bounds})" if bounds else "")
    if origin is Literal:
        return ", ".join(dict.fromkeys(_spelled(argument) for argument in arguments))  # "false" and False look alike
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict or annotation is dict:
        return "mapping"
    names = {int: "int", float: "float", bool: "true, false", str: "string", Any: "any"}
    return names.get(annotation, "section")


def _bounds(metadata: Any) -> str:
    found = []
    for constraint in metadata:
        for name, words in _BOUNDS.items():
            if hasattr(constraint, name):
                bound = getattr(constraint, name)
                found.append(f"{words} {bound if isinstance(bound, int) else format(bound, 'g')}")
        if hasattr(constraint, "min_length"):
            found.append("not empty")
    return ", ".join(found)


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    default = info.get_default(call_default_factory=True)
    if default is None or default == [] or isinstance(default, BaseModel):
        return "unset"
    return _spelled(default)


def _spelled(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace("\n", "\\n")
