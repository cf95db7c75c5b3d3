"""From a YAML file and overrides to a checked run config."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ebft.config.overrides import apply_overrides
from ebft.config.schema import RunConfig
from ebft.config.yaml_text import parse_yaml, problem
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
    except yaml.YAMLError as error:
        line, words = problem(error)
        where = f"{path}, line {line}" if line else f"{path}"
        raise ConfigError(f"{where}: not valid YAML: {words}.") from None
    if values is None:
        raise ConfigError(f"The config {path} is empty. It needs at least base_model and datasets.")
    if not isinstance(values, dict):
        raise ConfigError(f"The config {path}, line 1: it must be keys with values (key: value), not {values!r:.60}.")
    return values
