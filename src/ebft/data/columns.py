"""Columns of raw rows, and a note of the columns that are read."""

from collections.abc import Iterable, Mapping
from typing import Any

from ebft.errors import DataError

_MISSING = object()


class Columns(dict):
    """A raw row; `read` are the columns that `value_of` has returned the value of."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        super().__init__(row)
        self.read: set[str] = set()


def _find(row: Mapping[str, Any], name: str) -> Any:
    if name in row or "." not in name:
        return row.get(name, _MISSING)
    value: Any = row
    for key in name.split("."):
        if value is None:
            return None
        value = value.get(key, _MISSING) if isinstance(value, Mapping) else _MISSING
    return value


def has_column(row: Mapping[str, Any], name: str) -> bool:
    """Whether a row has a column, or a message a key; `a.b` is the key b of a, which may be missing as a whole."""
    return _find(row, name) is not _MISSING


def value_of(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column; `a.b` is the key b of column a, unless a column has this name. Raises KeyError."""
    value = _find(row, name)
    if value is _MISSING:
        raise KeyError(name)
    if isinstance(row, Columns):
        row.read.add(name if name in row else name.partition(".")[0])
    return value


def text_of(row: Mapping[str, Any], column: str) -> str:
    """The text in a column, empty for a missing value. Raises DataError if it is not text."""
    value = value_of(row, column)
    if not isinstance(value, str | None):
        raise DataError(f"column {column!r} must contain text, got {type(value).__name__}")
    return value or ""


def optional_text(row: Mapping[str, Any], column: str) -> str:
    """The text in a column, empty if the row does not have it."""
    return text_of(row, column) if has_column(row, column) else ""


def first_shape(row: Mapping[str, Any], shapes: Iterable[tuple[str, ...]]) -> tuple[str, ...] | None:
    """The first of `shapes`, names of columns, that the row has; one with values before others, None if there is none.

    Rows of a source can have different shapes: then each has the columns of all, without values.
    """
    found = [names for names in shapes if all(has_column(row, name) for name in names)]
    filled = (names for names in found if all(_find(row, name) is not None for name in names))
    return next(filled, found[0] if found else None)


def first_present(row: Mapping[str, Any], columns: Iterable[str], wanted: str, fix: str) -> str:
    """The first of `columns` that the row has. Raises DataError with what is `wanted` and how to `fix` it."""
    found = first_shape(row, [(column,) for column in columns])
    if found is None:
        raise DataError(
            f"no column with {wanted}: expected {', '.join(columns)}, but the row has {', '.join(row)}. {fix}"
        )
    return found[0]


# Columns with content that models are not trained on, and what to do if one was not read.
_MEDIA = {
    f"{name}{ending}": "content, but models are trained on text only. Remove the column if the texts are complete "
    "without it, or the row"
    for name in ("image", "audio", "video")
    for ending in ("", "s")
}
_SYSTEM = (
    "text, but this type has no place for a system message. Use a type of chats, a mapping of columns as type "
    "({field_system: ...}), or set drop_system_message: true to leave it out"
)


def _has_content(value: Any) -> bool:
    """Whether a value is more than empty texts, lists and mappings, as rows without an image have."""
    if isinstance(value, Mapping | list | tuple):
        return any(map(_has_content, value.values() if isinstance(value, Mapping) else value))
    return bool(value.strip()) if isinstance(value, str | bytes) else value is not None


def check_unread(row: Columns, system: str | None) -> None:
    """Raise DataError for a column with content that must not be left out and was not read: media, and `system`."""
    for name, problem in {**_MEDIA, **({system: _SYSTEM} if system else {})}.items():
        if name not in row.read and _has_content(row.get(name)):
            raise DataError(f"column {name!r} has {problem}.")
