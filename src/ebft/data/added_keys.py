"""Keys that Arrow adds to tool calls and to descriptions of tools, with the value None.

Arrow gives each mapping of a column the keys of all rows, so that a call would get the arguments of other tools.
Columns of JSON values (`JsonText`, `datasets.Json`) have no such keys, and their nulls are the data's own.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

from datasets import Dataset, Features

from ebft.data.json_values import JsonText
from ebft.data.processes import map_rows

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
