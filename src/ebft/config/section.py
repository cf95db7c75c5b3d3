"""Base class of the sections of a run config: strict types, no unknown keys, empty values mean unset.

Options that trainers also accept from Python are dataclasses whose annotations hold bounds and help texts. This module
converts them to config sections.
"""

import math
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from ebft.files import expand_home

Options = TypeVar("Options", bound=type)
MAX_COUNT, MAX_NUMBER = 10**15, 1e30  # of keys that declare no smaller bound
NotBlank = Annotated[str, Field(pattern=r"\S")]


class ExpectedError(ValueError):
    """An invalid value of a key; the message is what was expected instead of it."""


# Validators are built on first use: those of most groups of keys never are.
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=(), defer_build=True)


class Section(BaseModel):
    """A group of keys of the config."""

    model_config = STRICT

    @model_validator(mode="before")
    @classmethod
    def _empty_means_unset(cls, data: Any) -> Any:
        """Treat `key:` without a value, as in `wandb_run_id:`, as if the key were absent."""
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in cls.model_fields}

    @field_validator("*")
    @classmethod
    def _can_be_meant(cls, value: Any) -> Any:
        """Refuse numbers that overflow those of libraries, and in mappings for them, NaN and infinity."""
        if isinstance(value, int | float):
            largest = MAX_COUNT if isinstance(value, int) else MAX_NUMBER
            if abs(value) > largest:
                raise ExpectedError(f"a value of at most {largest:g}")
        elif isinstance(value, dict | list) and not _is_finite(value):
            raise ExpectedError("finite numbers")
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The JSON schema, in which keys with a default also accept null, which means unset."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        required = schema.get("required", ())
        for name, key in schema.get("properties", {}).items():
            if name not in required:
                schema["properties"][name] = or_null(key)
        return schema


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def or_null(key: dict[str, Any]) -> dict[str, Any]:
    """The schema of a key that may also be null; its description and default stay at the top."""
    choices = key.get("anyOf", [])
    if {"type": "null"} in choices or key.get("type") == "null":
        return key
    if choices:
        return {**key, "anyOf": [*choices, {"type": "null"}]}
    about = {name: value for name, value in key.items() if name in ("title", "description", "default")}
    return {"anyOf": [{name: value for name, value in key.items() if name not in about}, {"type": "null"}], **about}


def paths(*names: str) -> Any:
    """A validator of a section that expands `~` in these keys, which hold paths or names, on one line."""

    def expanded(value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, str):
            return value
        if value != value.strip("\r\n"):
            raise ValueError(
                f"{info.field_name}: {value!r:.200} begins or ends with a line break, as blocks that start with > or | "
                "do. Start the block with >- or |-, or write the value on one line."
            )
        try:
            return expand_home(value)
        except ValueError as error:
            raise ValueError(f"{info.field_name}: {error}") from error

    return field_validator(*names)(expanded)


def with_help(options: Options) -> Options:
    """Copy the help texts of a dataclass's annotations to its fields, for transformers' argument parser."""
    hints = get_type_hints(options, include_extras=True)
    for option in fields(options):
        option.metadata = MappingProxyType({"help": hints[option.name].__metadata__[0].description})
    return options


def option_names(*options: type) -> list[str]:
    """The names of the options of one or more dataclasses."""
    return [option.name for dataclass in options for option in fields(dataclass)]


@cache
def section_of_options(options: type, name: str | None = None, base: type[Section] = Section) -> type[Section]:
    """The config section with the options of a dataclass; can be pickled if it is an attribute of that module."""
    hints = get_type_hints(options, include_extras=True)
    declared = {option.name: (hints[option.name], _default(option)) for option in fields(options)}
    about = {"__base__": base, "__doc__": options.__doc__, "__module__": options.__module__}
    return create_model(name or options.__name__, **about, **declared)


def _default(option: Any) -> Any:
    return Field(default_factory=option.default_factory) if option.default is MISSING else option.default


def flat_settings(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted key; entries of lists are dicts."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from flat_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.model_dump() if isinstance(value, Section) else value
