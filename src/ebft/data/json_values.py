"""Columns of JSON values, which are read as they were written: with their nulls, and with the keys of their row alone.

Arrow gives each mapping of a column the keys of all rows. `datasets.Json` does not, but it rounds numbers, and reads
texts that happen to be JSON as what they contain.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa
from datasets import Dataset, Features, Value
from datasets.features.features import register_feature

from ebft.data.tables import map_rows

_INT64 = range(-(2**63), 2**63)
_ARROW = {str: "string", bool: "bool", float: "float64", int: "int64"}


@dataclass
class JsonText:
    """A feature of `datasets`: any JSON value, stored as its JSON text; a null is a missing value."""

    decode: bool = True
    id: str | None = field(default=None, repr=False)
    dtype: ClassVar[str] = "string"
    pa_type: ClassVar[Any] = pa.string()
    _type: str = field(default="JsonText", init=False, repr=False)

    def __call__(self) -> pa.DataType:
        return self.pa_type

    def encode_example(self, value: Any) -> str | None:
        """The JSON text of a value."""
        return None if value is None else json.dumps(value, ensure_ascii=False)

    def decode_example(self, text: str | None, token_per_repo_id: Any = None) -> Any:
        """The value of a JSON text."""
        return None if text is None else json.loads(text)

    def cast_storage(self, storage: pa.Array) -> pa.Array:
        """Stored texts, which may have another type of strings."""
        return storage.cast(pa.string())


with warnings.catch_warnings(action="ignore"):  # that it is experimental
    register_feature(JsonText, "JsonText")


class Types:
    """The types of columns: of Arrow if all values are texts, booleans, or numbers of one type, and else of JSON."""

    def __init__(self, columns: Iterable[str] = ()) -> None:
        self._found: dict[str, set[type]] = {name: set() for name in columns}

    def add(self, row: dict[str, Any]) -> None:
        """Take the values of a row into account."""
        for name, value in row.items():
            kinds = self._found.setdefault(name, set())
            if value is not None:
                kinds.add(type(value) if type(value) is not int or value in _INT64 else dict)

    def mixed(self) -> Iterator[tuple[str, list[str]]]:
        """The columns that have values of several types, with their names, except for numbers."""
        for name, kinds in self._found.items():
            if len(kinds) > 1 and not kinds <= {int, float, dict}:
                yield name, sorted(kind.__name__ for kind in kinds)

    def features(self) -> dict[str, Any]:
        """The features of the columns, in the order in which they were found."""
        return {name: _feature(kinds) for name, kinds in self._found.items()}


def _feature(kinds: set[type]) -> Any:
    if len(kinds) < 2 and kinds <= _ARROW.keys():
        return Value(_ARROW[next(iter(kinds), str)])
    return JsonText()


def stored(values: list[Any], feature: Any) -> list[Any]:
    """The values of a column as Arrow stores them."""
    return [feature.encode_example(value) for value in values] if isinstance(feature, JsonText) else values


Clean = Callable[[Any], Any]
Names = Set[str | None]
_CALLS = "tool_calls"  # the part of a message in which the presence of a key has a meaning at every depth


def without_added_keys(features: Features, whole: str | None, calls: str | None = None) -> Clean:
    """Return a function that removes the added keys of a row: in tool calls, and in the column `whole`.

    `calls` is the name of tool calls in the data, if it is another one than that of chat templates.
    """
    return _of_mapping(features, {whole}, {_CALLS, calls}) or (lambda row: row)


def as_json(rows: Dataset, columns: Iterable[str]) -> Dataset:
    """The rows with their `columns` as JSON values, without the keys that were added to tool calls."""
    changed = {name: JsonText() for name in columns if not isinstance(rows.features[name], JsonText)}
    if not changed:
        return rows
    clean = without_added_keys(rows.features, None)
    encoded = lambda row: {name: kind.encode_example(clean(dict(row))[name]) for name, kind in changed.items()}
    return map_rows(rows, encoded, features=Features({**rows.features, **changed}))


def with_own_calls(rows: Any) -> Any:
    """A Dataset whose tool calls have the keys of their row alone; another value as it is."""
    if isinstance(rows, Mapping):
        return {name: with_own_calls(part) for name, part in rows.items()}
    if not isinstance(rows, Dataset):
        return rows
    return as_json(rows, [name for name, kind in rows.features.items() if _cleaner(kind, {_CALLS}) is not None])


def without_missing(value: Any) -> Any:
    """The value without the keys of mappings that are None, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_missing(item) for key, item in value.items() if item is not None}
    return [without_missing(item) for item in value] if isinstance(value, list) else value


def _cleaner(feature: Any, calls: Names) -> Clean | None:
    """The function that cleans the values of a feature, None if they contain no tool calls with added keys."""
    if isinstance(feature, Mapping):
        return _of_mapping(feature, calls, calls)
    clean = None if _item(feature) is None else _cleaner(_item(feature), calls)
    return None if clean is None else lambda values: None if values is None else [clean(value) for value in values]


def _of_mapping(features: Mapping[str, Any], whole: Names, calls: Names) -> Clean | None:
    """The same for mappings, in which everything below the keys `whole` is cleaned."""
    found = {key: _below(feature) if key in whole else _cleaner(feature, calls) for key, feature in features.items()}
    parts = {key: clean for key, clean in found.items() if clean is not None}
    if not parts:
        return None
    return lambda value: None if value is None else {**value, **{key: parts[key](value[key]) for key in parts}}


def _below(feature: Any) -> Clean | None:
    return without_missing if _has_struct(feature) else None


def _has_struct(feature: Any) -> bool:
    """Whether a feature contains mappings whose keys Arrow has unified."""
    return isinstance(feature, Mapping) or (_item(feature) is not None and _has_struct(_item(feature)))


def _item(feature: Any) -> Any:
    """The feature of the items of a list, None for other features."""
    return feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
