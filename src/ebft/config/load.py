"""Load a run config from a YAML file and overrides (`ebft.stride=4`, `datasets.0.path=notes.txt`)."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ebft.config.schema import RunConfig
from ebft.config.yaml_text import DEEPEST, YAMLError, parse_yaml, problem
from ebft.errors import ConfigError, shortened
from ebft.files import check_regular

_LARGEST_FILE = 10_000_000  # bytes; a larger file is a data set or a model
_SHOWN = 100  # characters of an override in messages


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Read the YAML file at `path`, apply `overrides` (`dotted.key=value`), and check the result.

    Raises ConfigError with the file and line of malformed YAML, or with each invalid key and its allowed values.
    """
    values = read_values(path, overrides)
    try:
        return RunConfig.from_dict(values)
    except ConfigError as error:
        raise ConfigError(f"{path}:\n{error}") from None


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
