"""Columns of JSON values, which are read as they were written: with their nulls, and with the keys of their row alone.

Arrow gives each mapping of a column the keys of all rows. `datasets.Json` does not, but it rounds numbers, and reads
texts that happen to be JSON as what they contain.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa
from datasets.features.features import Value, register_feature

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
