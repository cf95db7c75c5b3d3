"""From a YAML file and overrides (`ebft.stride=4`, `datasets.0.path=notes.txt`) to a checked run config."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ebft.config.schema import RunConfig
from ebft.config.yaml_text import YAMLError, parse_yaml, problem
from ebft.errors import ConfigError


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Read the YAML file at `path`, apply `overrides` (`dotted.key=value`), and check the result.

    ConfigError says what is wrong: file and line of malformed YAML, or each wrong key with what is allowed.
    """
    values = _read(Path(path))
    apply_overrides(values, overrides)
    try:
        return RunConfig.from_dict(values)
    except ConfigError as error:
        raise ConfigError(f"{path}:\n{error}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot read the config {path}: {error.strerror}. Give the path of a YAML file.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"The config {path} is not UTF-8 text ({error.reason}). Save it as UTF-8.") from None
    try:
        values = parse_yaml(text)
    except YAMLError as error:
        line, words = problem(error)
        where = f"{path}, line {line}" if line else f"{path}"
        raise ConfigError(f"{where}: not valid YAML: {words}.") from None
    if values is None:
        raise ConfigError(f"The config {path} is empty. It needs at least base_model and datasets.")
    if not isinstance(values, dict):
        raise ConfigError(f"The config {path}, line 1: it must be keys with values (key: value), not {values!r:.60}.")
    return values


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Write each `dotted.key=value` into the nested `values`; values are YAML, an empty one means unset."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides must be a list of texts, not one text. Write [{overrides!r}].")
    for override in overrides:
        key, value = _split(override)
        _assign(values, key.split("."), value, override)


def _split(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    key = key.strip()
    if key.startswith("-"):
        plain = key.strip("-").replace("-", "_")
        raise ConfigError(f"The override {override!r} is written without dashes: {plain}={text or 'VALUE'}.")
    if not equals or not key:
        raise ConfigError(f"The override {override!r} is not key=value. Write for example ebft.stride=4.")
    try:
        return key, parse_yaml(text)
    except YAMLError as error:
        _, words = problem(error)
        raise ConfigError(
            f"The value of the override {override!r} is not YAML: {words}. Quote it: {key}='\"...\"'."
        ) from None


def _assign(values: Any, path: list[str], value: Any, override: str) -> None:
    """Walk along `path` and set its last part; sections that are not there yet are made."""
    for part, following in zip(path, path[1:]):
        step = _step(values, part, override)
        inner = values[step] if isinstance(values, list) else values.get(step)
        if inner is None:
            inner = [] if following.isdecimal() else {}
            values[step] = inner
        values = inner
    step = _step(values, path[-1], override)
    values[step] = value


def _step(values: Any, part: str, override: str) -> str | int:
    """`part` as a key of a mapping or a position in a list; ConfigError where it can be neither."""
    if isinstance(values, dict):
        return part
    if not isinstance(values, list):
        raise ConfigError(f"The override {override!r} looks for {part!r} inside {values!r}, which has no keys.")
    if not part.isdecimal() or int(part) > len(values):
        raise ConfigError(
            f"The override {override!r} needs a position in a list of {len(values)}, not {part!r}. "
            "Positions count from 0."
        )
    position = int(part)
    if position == len(values):  # one past the end adds an element
        values.append(None)
    return position
