"""Base class of the sections of a run config: strict types, no unknown keys, empty values mean unset.

Options that trainers also accept from Python are dataclasses whose annotations hold bounds and help texts. This module
converts them to config sections. Last come the keys of a dataset that describe the shape of its rows, which modules
below `ebft.config.keys.data` read: messages, roles, labels of turns, prompt formats.
"""

import ast
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache, wraps
from itertools import pairwise
from pathlib import Path
from string import Formatter
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import pydantic
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ebft.errors import ConfigError, warn

Options = TypeVar("Options", bound=type)
MAX_COUNT, MAX_NUMBER = 10**15, 1e30  # of keys that declare no smaller bound
NotBlank = Annotated[str, Field(pattern=r"\S")]
Steps = Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)]  # a number, or a fraction of all steps


class ExpectedError(ValueError):
    """An invalid value of a key; the message is what was expected instead of it."""


# Validators are built on first use, which most groups of keys never have.
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=(), defer_build=True)


@cache
def texts_below(module: str) -> dict[tuple[str, str], str]:
    """The texts that follow the attributes of the classes of a module, by class and attribute: their descriptions."""
    file = getattr(sys.modules[module], "__file__", None)  # absent in an interpreter and a notebook
    tree = ast.parse(Path(file).read_text(encoding="utf-8") if file else "")
    return {
        (kind.name, each.target.id): " ".join(text.value.value.split())
        for kind in tree.body
        if isinstance(kind, ast.ClassDef)
        for each, text in pairwise(kind.body)
        if isinstance(each, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


class Section(BaseModel):
    """A group of keys of the config; the text below a key, or its description, is its help."""

    model_config = STRICT

    @model_validator(mode="before")
    @classmethod
    def _empty_means_unset(cls, data: Any) -> Any:
        """Treat `key:` without a value, as in `wandb_run_id:`, as if the key were absent, also if it is unknown."""
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data

    @field_validator("*")
    @classmethod
    def _can_be_meant(cls, value: Any) -> Any:
        """Refuse numbers that overflow in libraries, and in mappings for libraries, NaN and infinity."""
        if isinstance(value, int | float):
            largest = MAX_COUNT if isinstance(value, int) else MAX_NUMBER
            if abs(value) > largest:
                raise ExpectedError(f"a value of at most {largest:g}")
        elif isinstance(value, dict | list) and not _is_finite(value):
            raise ExpectedError("finite numbers")
        return value

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for name, field in cls.model_fields.items():
            field.description = field.description or texts_below(cls.__module__).get((cls.__name__, name))

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: pydantic.GetJsonSchemaHandler) -> dict[str, Any]:
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


def warn_of_variables(key: str, value: str) -> None:
    """Warn of a name of an environment variable in a value."""
    if re.search(r"\$\{\w+\}|(^|/)\$[A-Za-z_]\w*(/|$)", value):
        warn(f"{key}: {value!r:.200}: environment variables are replaced by the shell, but not here.")


def paths(*names: str) -> Any:
    """A validator of a section that expands `~` in these keys, which hold paths or names, on one line. Only `path`, of
    a dataset, may be a URL."""

    def expanded(value: Any, info: pydantic.ValidationInfo) -> Any:
        if not isinstance(value, str):
            return value
        expanded, problem = os.path.expanduser(value), None
        if value != value.strip("\r\n"):
            problem = "begins or ends with a line break. Start its block with >- or |-, or write it on one line"
        elif "://" in value and info.field_name != "path":
            problem = "is a URL. Set a path on this machine"
        elif expanded.startswith("~"):
            problem = "is in an unknown home folder. Write the full path"
        if problem is not None:
            raise ValueError(f"{info.field_name}: {value!r:.200} {problem}.")
        warn_of_variables(info.field_name, value)
        return expanded

    return field_validator(*names)(expanded)


def with_help(options: Options) -> Options:
    """Copy the texts below a dataclass's fields, or in their annotations, to the fields, for transformers' parser."""
    hints, below = get_type_hints(options, include_extras=True), texts_below(options.__module__)
    for option in fields(options):
        if "help" not in option.metadata:  # which a base class has given
            text = below.get((options.__name__, option.name)) or hints[option.name].__metadata__[0].description
            option.metadata = MappingProxyType({"help": text})
    return options


def with_prefix(options: Options) -> Options:
    """Let a dataclass of training arguments accept its options with the prefix `ebft_` too, as axolotl names them."""
    names, create = {option.name for option in fields(options)}, options.__init__

    @wraps(create)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in [name for name in kwargs if name.startswith("ebft_") and name.removeprefix("ebft_") in names]:
            plain = name.removeprefix("ebft_")
            if plain in kwargs:
                raise ConfigError(f"{plain} and {name} are two names of the same option. Remove one.")
            kwargs[plain] = kwargs.pop(name)
        create(self, *args, **kwargs)

    options.__init__ = __init__
    return options


def option_names(*options: type) -> list[str]:
    """The names of the options of one or more dataclasses."""
    return [option.name for dataclass in options for option in fields(dataclass)]


@cache
def section_of_options(options: type, name: str | None = None) -> type[Section]:
    """The config section with the options of a dataclass; can be pickled if it is an attribute of that module."""
    hints = get_type_hints(options, include_extras=True)
    declared = {}
    for option in fields(options):
        default = {"default": option.default} if option.default is not MISSING else {}
        default = default or {"default_factory": option.default_factory}
        declared[option.name] = hints[option.name], Field(**default, description=option.metadata["help"])
    about = {"__base__": Section, "__doc__": options.__doc__, "__module__": options.__module__}
    return pydantic.create_model(name or options.__name__, **about, **declared)


def flat_settings(section: Section, prefix: str = "", changed: bool = False) -> Iterator[tuple[str, Any]]:
    """Values by dotted key; entries of lists are dicts. `changed`: only values that differ from their defaults."""
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from flat_settings(value, f"{prefix}{name}.", changed)
        elif not changed or value != (None if info.is_required() else info.get_default(call_default_factory=True)):
            yield f"{prefix}{name}", _plain(value, changed)


def changed_keys(section: Section) -> Iterator[tuple[str, Any]]:
    """Dotted key and value of each option that differs from its default; sections in lists as plain dicts."""
    return flat_settings(section, changed=True)


def _plain(value: Any, changed: bool) -> Any:
    if isinstance(value, list):
        return [_plain(item, changed) for item in value]
    if isinstance(value, Section):
        return dict(changed_keys(value)) if changed else value.model_dump()
    return value


THINKING = "reasoning_content"
EOS = Literal["turn", "all", "last", "none"]


def without_empty_names(data: Any) -> Any:
    """Treat columns and system prompts that are empty, as `system_prompt: ""`, as if the keys were absent."""
    if not isinstance(data, dict):
        return data
    return {
        key: value
        for key, value in data.items()
        if value != "" or not (key == "system_prompt" or str(key).startswith("field_"))
    }


class PromptFormat(Section):
    """A prompt written out as text, and the columns that it is made of (`type: user_defined`)."""

    field_instruction: NotBlank = Field("instruction", description="Column of the instruction.")
    field_input: NotBlank = Field("input", description="Column of the input; rows may lack it.")
    field_output: NotBlank = Field("output", description="Column of the completion.")
    field_system: NotBlank = Field("system", description="Column of the system prompt; rows may lack it.")
    system_prompt: NotBlank | None = Field(None, description="System prompt of rows without one.")
    system_format: str = "{system}"
    """How the system prompt is written before the rest; rows without one start with format."""
    format: str = "{instruction}\n\n{input}"
    """The prompt of rows with an input, with {instruction} and {input}."""
    no_input_format: str | None = None
    """The prompt of rows without an input, with {instruction}. If unset: {instruction} if format is not set either,
    else format with an empty input."""

    _empty_names_are_unset = model_validator(mode="before")(without_empty_names)

    @field_validator("system_format", "format", "no_input_format")
    def _known_placeholders(cls, text: str | None, info: pydantic.ValidationInfo) -> str | None:
        known = {"system_format": ("system",), "format": ("instruction", "input"), "no_input_format": ("instruction",)}
        for _, name, spec, conversion in Formatter().parse(text or ""):
            if name is not None and (name not in known[str(info.field_name)] or spec or conversion):
                names = " and ".join(f"{{{name}}}" for name in known[str(info.field_name)])
                raise ValueError(f"unknown placeholder {{{name}}}; expected {names}. Double other braces.")
        return text


class ShapeKeys(Section):
    """Keys of chats and of prompts written out as text."""

    field_messages: str | None = None
    """The same as field, for chats; if unset, messages or conversations. responses_create_params.input with type:
    chat_template selects nemo_gym.transform, in which all messages are the prompt."""
    message_property_mappings: dict[NotBlank, NotBlank] | None = None
    """Keys of a message for the chat template, and their names in the data, for example {role: from, content: value}.
    Keys that are not named keep their names."""
    message_field_role: NotBlank | None = Field(None, description="The same as message_property_mappings.role.")
    message_field_content: NotBlank | None = Field(None, description="The same as message_property_mappings.content.")
    roles: dict[NotBlank, Annotated[list[NotBlank], Field(min_length=1)]] | None = None
    """Roles for the chat template, and their names in the data, for example {user: [human, customer], assistant:
    [gpt]}. Unless they are named, human means user, gpt, model, chatgpt, bing and bard mean assistant, observation
    means tool, and function_call is an assistant turn with the tool calls in its content."""
    roles_to_train: list[NotBlank] | None = None
    """SFT and strided mode: roles whose turns are trained on. If unset, the key roles_to_train of the config. Can be
    empty with message_field_training, if only marked turns are trained on."""
    train_on_eos: EOS | None = None
    """SFT and strided mode: ends of turns that are trained on, which is all that the chat template writes after the
    content. turn (default): of the turns that are trained on; all: of all turns (SFT only); last: of the last turn that
    is trained on; none."""
    train_on_eot: EOS | None = Field(None, description="The same as train_on_eos.")
    message_field_training: NotBlank | None = None
    """SFT and strided mode: key of messages with true or false (or 1 or 0), whether the turn is trained on. For turns
    without it, their role decides."""
    field_thinking: NotBlank = Field(THINKING, description="Key of messages with the thinking before the content.")
    template_thinking_key: NotBlank = Field(THINKING)
    """Key with which thinking is passed to the template; content writes it into the content, as a <think> block."""
    split_thinking: bool = False
    """Pass thinking in tags at the start of an assistant's content to the chat template separately, as
    template_thinking_key."""
    drop_system_message: bool = Field(False, description="Leave out the system messages of chats.")
    field_system: NotBlank | None = None
    """Column with the system message of a chat. If unset: for chats without one, the column system if rows have it."""
    system_prompt: NotBlank | None = Field(None, description="System message of chats without one.")
    field_tools: NotBlank = Field("tools")  # with a plain value, pydantic 2.9 gives it to all NotBlank
    """Column with the descriptions of tools for the chat template, a list or JSON text; rows may lack it. For chats."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template for the rows of this dataset, such as {enable_thinking: false}."""
    user_defined: PromptFormat | None = None
    """Columns and format of prompts written out as text; `type` can be this mapping itself."""
