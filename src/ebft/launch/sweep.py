"""The file of `ebft train --sweep`: lists of values, whose combinations are runs.

A mapping of keys to lists is a grid: every combination of one value per key. A list of mappings names the combinations.
"""

import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebft.config.yaml_text import YAMLError, parse_yaml, problem
from ebft.errors import ConfigError, shortened
from ebft.paths import check_regular

_OWN = ("output_dir", "resume_from_checkpoint", "auto_resume_from_checkpoints")  # set for each run
MOST_RUNS = 1000  # of a sweep, unless --max-runs is given
_LONGEST = 120  # characters of a name, which is the name of a folder
_SPACE = re.compile(r"\s")
_OTHERS = re.compile(r"[^A-Za-z0-9._+-]+")  # characters of values that a name does not contain


@dataclass(frozen=True)
class Combination:
    """The values of one run by their keys, and its name, which is that of its folder."""

    name: str
    values: dict[str, Any]

    def overrides(self) -> list[str]:
        """The values as overrides of the config."""
        return [f"{key}={json.dumps(value)}" for key, value in self.values.items()]


def read_sweep(path: Path, most: int = MOST_RUNS) -> list[Combination]:
    """The combinations of a sweep file, in its order. Raises ConfigError if it has none, or more than `most`."""
    found = _read(path)
    if isinstance(found, dict) and found:
        combinations = list(_grid(path, found, most))
    elif isinstance(found, list) and found:
        _check_number(path, len(found), most)
        combinations = [_explicit(path, place, entry) for place, entry in enumerate(found)]
    else:
        raise ConfigError(
            f"{path}: expected a mapping of keys to lists of values, or a list of mappings, one per run; got "
            f"{found!r:.60}."
        )
    counts = Counter(map(_canonical, combinations))
    for values in combinations:
        if counts[_canonical(values)] > 1:
            raise ConfigError(f"{path}: the combination {_name(values)} occurs more than once. Remove one of them.")
    names = Counter(map(_name, combinations))
    return [
        Combination(_name(values) + (_mark(values) * (names[_name(values)] > 1)), values) for values in combinations
    ]


def _read(path: Path) -> Any:
    try:
        check_regular(path, ConfigError, f"Sweep file {path}")
        return parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read sweep file {path} ({error.strerror}). Give the path to a YAML file.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"Sweep file {path} is not valid UTF-8 ({error.reason}).") from None
    except YAMLError as error:
        line, words = problem(error)
        raise ConfigError(f"{path}{f', line {line}' if line else ''}: invalid YAML: {shortened(words)}.") from None


def _check_number(path: Path, runs: int, most: int) -> None:
    if runs > most:
        raise ConfigError(
            f"{path} describes {runs:,} runs, more than {most:,}. Remove keys or values, or allow them with --max-runs "
            f"{runs}."
        )


def _grid(path: Path, lists: dict[Any, Any], most: int) -> Iterator[dict[str, Any]]:
    for key, values in lists.items():
        _check_key(path, key)
        if isinstance(values, dict):
            raise ConfigError(f"{path}: {key}: write the keys of a section with dots, for example {key}.NAME: [...].")
        if not isinstance(values, list):
            raise ConfigError(f"{path}: {key}: expected a list of values, got {values!r:.60}. Use [{values!s:.60}].")
        if not values:
            raise ConfigError(f"{path}: {key}: the list is empty. Give at least one value, or remove the key.")
        _check_values(path, {key: values})
    _check_number(path, math.prod(map(len, lists.values())), most)
    for values in itertools.product(*lists.values()):
        yield dict(zip(lists, values))


def _explicit(path: Path, place: int, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict) or not entry:
        raise ConfigError(f"{path}: entry {place + 1}: expected a mapping of keys to values, got {entry!r:.60}.")
    for key in entry:
        _check_key(path, key)
    _check_values(path, entry)
    return entry


def _check_key(path: Path, key: Any) -> None:
    if not isinstance(key, str) or not all(key.split(".")) or "=" in key:
        raise ConfigError(f"{path}: {key!r:.60} is not a config key.")
    if _SPACE.search(key):
        raise ConfigError(f"{path}: {key!r:.60} is not a config key, because it contains a space. Remove the space.")
    if key in _OWN:
        raise ConfigError(
            f"{path}: {key} cannot be swept: each run has a folder in output_dir, and resumes from its own checkpoints."
        )


def _check_values(path: Path, values: dict[str, Any]) -> None:
    for key, value in values.items():
        try:
            json.dumps(value)
        except TypeError as error:  # of the YAML tags !!binary and !!set, for example
            raise ConfigError(
                f"{path}: {key}: {value!r:.60} cannot be the value of a key ({error}). Use numbers, text, true, false, "
                "null, lists or mappings, without a YAML tag such as !!binary or !!set."
            ) from None


def _canonical(values: dict[str, Any]) -> str:
    return json.dumps(values, sort_keys=True)


def _name(values: dict[str, Any]) -> str:
    name = ",".join(f"{key}={_shown(value)}" for key, value in values.items())
    return name if len(name) <= _LONGEST else name[:_LONGEST].rstrip(",=") + _mark(values)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if isinstance(value, int | float):
        return text
    return _OTHERS.sub("-", text).strip("-.") or "empty"


def _mark(values: dict[str, Any]) -> str:
    """A suffix for names that are not unique, or shortened."""
    return "-" + hashlib.sha256(_canonical(values).encode()).hexdigest()[:8]
