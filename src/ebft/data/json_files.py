"""JSON and JSON Lines files as datasets, in which every value is the one that the file contains.

The reader of `datasets` takes the last of two equal keys, adds keys to objects, and turns texts into dates. The files
are read twice: for the types of the columns, and to write the rows to the cache of `datasets`, from which they are read
as they are needed.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from datasets import ArrowBasedBuilder, BuilderConfig, Dataset, DatasetInfo, Features, SplitGenerator, Value, Version
from datasets.builder import Key
from datasets.features.features import register_feature

from ebft.data.tables import map_rows, reading
from ebft.errors import DataError, cause, shortened
from ebft.files import opened, read_text

_BATCH = 1000  # rows that are converted at once
_SPACE = re.compile(r"\s*")
_COMMA = re.compile(r"\s*,?\s*")


@dataclass
class JsonFilesConfig(BuilderConfig):
    """The paths or URLs of the files."""

    files: list[str] | None = None


class JsonFiles(ArrowBasedBuilder):
    """Builder of a dataset with the rows of JSON files."""

    BUILDER_CONFIG_CLASS = JsonFilesConfig
    VERSION = Version("1.1.0")  # part of the folder in the cache

    def _info(self) -> DatasetInfo:
        return DatasetInfo()

    def _split_generators(self, dl_manager: Any) -> list[SplitGenerator]:
        types, paths = Types(), [path.removeprefix("file://") for path in self.config.files]
        if not all(map(os.path.isfile, paths)):  # URLs; the library takes local paths for patterns
            paths = list(dl_manager.iter_files(dl_manager.download_and_extract(paths)))
        for row in chain.from_iterable(json_rows(Path(path)) for path in paths):
            types.add(row)
        # A table has at least one column.
        self.info.features = Features(types.features() or {"text": Value("string")})
        return [SplitGenerator(name="train", gen_kwargs={"paths": paths})]

    def _generate_tables(self, paths: list[str]) -> Iterator[tuple[Key, pa.Table]]:
        features = self.info.features
        for number, path in enumerate(paths):
            rows, start = json_rows(Path(path), is_checked=True), 0
            while batch := list(islice(rows, _BATCH)):
                columns = {name: stored([row.get(name) for row in batch], kind) for name, kind in features.items()}
                yield Key(number, start), pa.table(columns, schema=features.arrow_schema)
                start += len(batch)


def read_json(files: list[str], version: str) -> Dataset:
    """The rows of JSON files, paths or URLs; `version` changes with their contents. Raises DataError with the line."""
    builder = JsonFiles(hash=version, files=files)
    with reading(shortened(", ".join(files))):
        builder.download_and_prepare()
    return builder.as_dataset(split="train")


def json_batches(paths: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of files one after the other, with the columns of the rows around them, which may be None."""
    columns: dict[str, None] = {}
    for path in paths:
        rows = json_rows(Path(path))
        while batch := list(islice(rows, _BATCH)):
            columns |= {name: None for row in batch for name in row}
            for row in batch:
                yield columns | row


def json_rows(path: Path, is_checked: bool = False) -> Iterator[dict[str, Any]]:
    """The rows of a file: objects, one per line or over several lines, or a list of objects or of texts. A null is a
    row without values. Raises DataError with the line or the row of an error, unless the file `is_checked`: known to
    have none."""
    decoder = json.JSONDecoder() if is_checked else json.JSONDecoder(object_pairs_hook=_object, parse_float=_finite)
    line = count = 0
    try:
        for line, text in _texts(path, decoder):
            has_escapes = not is_checked and "\\u" in text
            for value in _values(text, decoder):
                row = {} if value is None else {"text": value} if isinstance(value, str) and not line else value
                if not isinstance(row, dict):
                    raise ValueError(f"a row must be a JSON object, got {row!r:.60}")
                count += 1
                if has_escapes:
                    json.dumps(row, ensure_ascii=False).encode()  # raises for one half of a pair of surrogates
                yield row
    except (RecursionError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            read_text(path)  # raises with the line
        if isinstance(error, DataError):
            raise
        place, problem = f"line {line}" if line else f"row {count}", cause(error)
        if isinstance(error, json.JSONDecodeError):
            place, problem = f"line {line or error.lineno}", f"not valid JSON ({error.msg} at column {error.colno})"
        raise DataError(f"{path}, {place}: {problem}. Correct the file or leave it out.") from error
    if not count:
        raise DataError(f"{path}: the file is empty, or its list of rows. Correct the file or leave it out.")


def _texts(path: Path, decoder: json.JSONDecoder) -> Iterator[tuple[int, str]]:
    """The lines of a file with their numbers; its whole text with 0 if the first row is not a line."""
    with opened(path) as file:
        is_first = True
        for number, line in enumerate(file, start=1):
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            if is_first and text:
                is_first = False
                try:
                    is_line = isinstance(decoder.raw_decode(text)[0], dict)
                except (ValueError, RecursionError) as error:
                    is_line = not isinstance(error, json.JSONDecodeError)
                if not is_line:
                    yield 0, read_text(path)
                    return
            if text:
                yield number, text


def _values(text: str, decoder: json.JSONDecoder) -> Iterator[Any]:
    """The values of a text, converted one at a time: the items of a list, or values with white space between them."""
    at = _SPACE.match(text).end()
    if not text.startswith("[", at):
        while at < len(text):
            value, at = decoder.raw_decode(text, at)
            yield value
            at = _SPACE.match(text, at).end()
        return
    at = _SPACE.match(text, at + 1).end()
    while not text.startswith("]", at):
        value, at = decoder.raw_decode(text, at)  # raises at the end of a file that is cut off
        yield value
        at = _COMMA.match(text, at).end()
    if text[at + 1 :].strip():
        raise json.JSONDecodeError("text after the end of the list", text, at + 1)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
        raise ValueError(f"the key {twice!r} occurs {names.count(twice)} times in an object, so its value is ambiguous")
    return found


def _finite(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise ValueError(f"the number {digits:.60} is too large for a floating-point number")
    return value


_INT64 = range(-(2**63), 2**63)
_ARROW = {str: "string", bool: "bool", float: "float64", int: "int64"}


@dataclass
class JsonText:
    """A feature of `datasets`: any JSON value, stored as its JSON text; a null is a missing value.

    The `Json` of the library rounds numbers, and reads a text such as "12" as a number.
    """

    decode: bool = True
    id: str | None = field(default=None, repr=False)
    dtype: ClassVar[str] = "string"
    pa_type: ClassVar[Any] = pa.string()
    _type: str = field(default="JsonText", init=False, repr=False)

    def __call__(self) -> pa.DataType:
        return self.pa_type

    def encode_example(self, value: Any) -> str | None:
        return None if value is None else json.dumps(value, ensure_ascii=False)

    def decode_example(self, text: str | None, token_per_repo_id: Any = None) -> Any:
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
        one_type = lambda kinds: len(kinds) < 2 and kinds <= _ARROW.keys()
        return {
            name: Value(_ARROW[next(iter(kinds), str)]) if one_type(kinds) else JsonText()
            for name, kinds in self._found.items()
        }


def stored(values: list[Any], feature: Any) -> list[Any]:
    """The values of a column as Arrow stores them."""
    return [feature.encode_example(value) for value in values] if isinstance(feature, JsonText) else values


Clean = Callable[[Any], Any]
Names = Set[str | None]
_CALLS = {"tool_calls", "function_call"}  # the parts of a message in which a key has a meaning at every depth


def without_added_keys(features: Features, whole: str | None, calls: str | None = None) -> Clean:
    """Return a function that removes the added keys of a row: in tool calls, and in the column `whole`.

    `calls` is the name of tool calls in the data, if chat templates have another one.
    """
    return _of_mapping(features, {whole}, {*_CALLS, calls}) or (lambda row: row)


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
    return as_json(rows, [name for name, kind in rows.features.items() if _cleaner(kind, _CALLS) is not None])


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
    """The same for mappings, in which everything below the keys `whole` is cleaned; `a.b` is the key b of a."""
    found = {}
    for key, feature in features.items():
        below = {name.partition(".")[2] for name in whole if name and name.startswith(f"{key}.")}
        if key in whole:
            found[key] = without_missing if _has_struct(feature) else None
        elif below and isinstance(feature, Mapping):
            found[key] = _of_mapping(feature, below | calls, calls)
        else:
            found[key] = _cleaner(feature, calls)
    parts = {key: clean for key, clean in found.items() if clean is not None}
    if not parts:
        return None
    return lambda value: None if value is None else {**value, **{key: parts[key](value[key]) for key in parts}}


def _has_struct(feature: Any) -> bool:
    """Whether a feature contains mappings whose keys Arrow has unified."""
    return isinstance(feature, Mapping) or (_item(feature) is not None and _has_struct(_item(feature)))


def _item(feature: Any) -> Any:
    """The feature of the items of a list, None for other features."""
    return feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
