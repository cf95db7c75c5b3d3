"""Readable messages for pydantic's validation errors: the key, the given value, the expected value, a suggestion."""

import difflib
import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, NoReturn, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from ebft.config.axolotl import IGNORED_KEYS, UNSUPPORTED_IN_DATASETS, UNSUPPORTED_KEYS
from ebft.config.section import ExpectedError
from ebft.errors import ConfigError, shortened
from ebft.printed import value_without_secrets

# Words that pydantic says in another way.
_WANTED = {
    **dict.fromkeys(("string_too_short", "string_pattern_mismatch"), "a non-empty string"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a mapping of keys to values"),
    "bool_type": "true or false",
    "string_type": "a string (put it in quotes if it looks like a number)",
}
# Minimum similarity for suggesting a known key in place of an unknown one: a typo, not a different word.
_SLIP = 0.75
_LIST = "Run `ebft config` to list all keys."
_MOST_LINES, _MOST_CHARACTERS = 10, 1000  # of a message; further errors are counted
_SHOWN = 120  # characters of a value
_BRANCH = re.compile(r"(bool|int|float|str|constrained-\w+)$|(list|dict|literal|function)[-\[]")


def raise_config_error(error: ValidationError, model: type[BaseModel], prefix: str = "") -> NoReturn:
    """Raise one ConfigError with a line for each invalid key of `model`; dotted paths start with `prefix`."""
    details = _merged(error)
    lines: list[str] = []
    for detail in details[:_MOST_LINES]:
        line = shortened(_sentence(detail, model, prefix))
        if lines and sum(map(len, lines)) + len(line) > _MOST_CHARACTERS:
            break
        lines.append(line)
    if len(lines) < len(details):
        lines.append(f"... and {len(details) - len(lines)} more errors.")
    raise ConfigError("\n".join(lines)) from None


def _merged(error: ValidationError) -> list[dict[str, Any]]:
    """The details of an error, with one entry for the branches of a union."""
    by_key: dict[tuple, dict[str, Any]] = {}
    for detail in error.errors(include_url=False):
        # Some parts are types of a union (`bool`, `list[str]`) and no keys.
        first, *others = detail["loc"] or ("",)
        path = (first, *(part for part in others if not (isinstance(part, str) and _BRANCH.match(part))))
        seen = by_key.setdefault(path, {**detail, "loc": path, "wanted": []})
        wanted = _wanted(detail)
        if wanted and wanted not in seen["wanted"]:
            seen["wanted"].append(wanted)
    return list(by_key.values())


def _wanted(detail: dict[str, Any]) -> str | None:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "value_error":
        return str(context["error"]) if isinstance(context["error"], ExpectedError) else None
    if kind == "literal_error":
        return context["expected"]
    if kind == "too_short":
        return f"a list with at least {context['min_length']} element"
    words = detail["msg"].removeprefix("Input should be ").partition(",")[0]
    return _WANTED.get(kind, f"a value {words}" if words.startswith(("greater", "less")) else words)


def _sentence(detail: dict[str, Any], model: type[BaseModel], prefix: str) -> str:
    key = shortened(prefix + ".".join(str(part) for part in detail["loc"]), _SHOWN)
    if detail["type"] in ("extra_forbidden", "invalid_key"):
        return _unknown_key(key, detail["loc"], model, prefix)
    if detail["type"] == "missing":
        return f"{key} is missing. It is required and has no default."
    if detail["type"] == "value_error" and not detail["wanted"]:
        message = str(detail["ctx"]["error"])
        is_entry = any(isinstance(part, int) for part in detail["loc"])
        return f"{key}: {message}" if is_entry and not message.startswith(key) else message
    wanted = " or ".join(detail["wanted"]) or detail["msg"]
    if key == "rl":
        wanted += " (leave it out for SFT)"
    given = value_without_secrets(".".join(str(part) for part in detail["loc"]), detail["input"])
    return f"{key}: invalid value {shortened(repr(given), _SHOWN)}; expected {wanted}."


def _unknown_key(key: str, path: tuple, model: type[BaseModel], prefix: str) -> str:
    owner = model_at(model, path[:-1])
    names = [name for name in owner.model_fields if name not in IGNORED_KEYS] if owner else []
    name = str(path[-1])
    parent = prefix + "".join(f"{part}." for part in path[:-1])
    is_value = name not in IGNORED_KEYS and model_at(model, (name,)) is None
    elsewhere = [each for each in dotted_keys(model, prefix) if is_value and each.split(".")[-1] == name]
    dotted = ".".join(map(str, path))
    if dotted in UNSUPPORTED_KEYS:
        return f"{key} is not supported: {UNSUPPORTED_KEYS[dotted]}."
    if name in UNSUPPORTED_IN_DATASETS and path[0] in ("datasets", "test_datasets") and len(path) == 3:
        return f"{key} is not supported: {UNSUPPORTED_IN_DATASETS[name]}."
    name = name[:_SHOWN]
    words = {*name.lower().split("_")}
    near = difflib.get_close_matches(name, names, n=1, cutoff=_SLIP) or [
        full for full in names if words <= {*full.split("_")}
    ]
    if meant := [*elsewhere[:1], *(parent + full for full in near[:1])]:
        return f"Unknown key {key!r}. Did you mean {' or '.join(map(repr, meant))}?"
    return f"Unknown key {key!r}. {_LIST}"


def keys_of_others(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """The dotted unknown keys that are like no key of `model`, such as keys of other tools, or misplaced and false."""
    default = lambda name: model.model_fields[name].default if name in model.model_fields else None
    is_foreign = lambda detail: (
        _sentence(detail, model, "").endswith(_LIST)
        or (detail["input"] is False and default(detail["loc"][-1]) is False)
    )
    # Other tools have no keys in sections, but in the elements of lists.
    is_unknown = lambda kind, path: kind == "extra_forbidden" and (len(path) == 1 or isinstance(path[1], int))
    unknown = [detail for detail in _merged(error) if is_unknown(detail["type"], detail["loc"])]
    return [".".join(map(str, detail["loc"])) for detail in unknown if is_foreign(detail)]


def dotted_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of `model` and of its sections, except sections inside lists."""
    for name, info in model.model_fields.items():
        yield prefix + name
        section = section_of(info.annotation)
        if section is not None and get_origin(info.annotation) is not list:
            yield from dotted_keys(section, f"{prefix}{name}.")


def model_at(model: type[BaseModel], path: tuple) -> type[BaseModel] | None:
    """The section of `model` at a path of keys and list indices, or None if there is none."""
    owner: type[BaseModel] | None = model
    for part in path:
        if owner is None:
            return None
        if isinstance(part, int):
            continue
        info = owner.model_fields.get(part)
        owner = section_of(info.annotation) if info else None
    return owner


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model in an annotation such as `Section | None` or `list[Section]`, if any."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, list, Annotated):
        found = [section_of(argument) for argument in get_args(annotation)]
        return next((section for section in found if section), None)
    return None
