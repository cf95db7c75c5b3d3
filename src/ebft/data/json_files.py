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
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pyarrow as pa
from datasets import ArrowBasedBuilder, BuilderConfig, Dataset, DatasetInfo, Features, SplitGenerator, Value, Version
from datasets.builder import Key
from datasets.features.features import register_feature

from ebft.data.tables import map_rows, raise_if_full
from ebft.errors import DataError
from ebft.files import opened, read_text

_BATCH = 1000  # rows that are converted at once
_BOM = b"\xef\xbb\xbf"
_SPACE = re.compile(r"\s*")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_ADVICE = "Correct the file or leave it out."


@dataclass
class JsonFilesConfig(BuilderConfig):
    """The files of each split."""

    files: dict[str, list[str]] | None = None


class JsonFiles(ArrowBasedBuilder):
    """Builder of a dataset with the rows of JSON files."""

    BUILDER_CONFIG_CLASS = JsonFilesConfig
    VERSION = Version("1.1.0")  # part of the folder in the cache

    def _info(self) -> DatasetInfo:
        return DatasetInfo()

    def _split_generators(self, dl_manager: Any) -> list[SplitGenerator]:
        types, splits = Types(), []
        for split, paths in self.config.files.items():
            paths = [path.removeprefix("file://") for path in paths]
            if not all(map(os.path.isfile, paths)):  # URLs; the library takes local paths for patterns
                paths = list(dl_manager.iter_files(dl_manager.download_and_extract(paths)))
            for path in paths:
                for row in json_rows(Path(path)):
                    types.add(row)
            splits.append(SplitGenerator(name=split, gen_kwargs={"paths": paths}))
        # A table has at least one column.
        self.info.features = Features(types.features() or {"text": Value("string")})
        return splits

    def _generate_tables(self, paths: list[str]) -> Iterator[tuple[Key, pa.Table]]:
        features = self.info.features
        for number, path in enumerate(paths):
            rows, start = json_rows(Path(path), is_checked=True), 0
            while batch := list(islice(rows, _BATCH)):
                columns = {name: stored([row.get(name) for row in batch], kind) for name, kind in features.items()}
                yield Key(number, start), pa.table(columns, schema=features.arrow_schema)
                start += len(batch)


def read_json(files: dict[str, list[str]], version: str, split: str) -> Dataset:
    """A split of JSON files, given those of each split; `version` changes with their contents.

    Raises DataError with the file and the line of an error.
    """
    builder = JsonFiles(hash=version, files=files)
    try:
        builder.download_and_prepare()
    except Exception as error:
        raise_if_full(error)
        raise
    return builder.as_dataset(split=split)


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
    """The rows of a file: objects, one per line or over several lines, or a list of objects or of texts.

    A null is a row without values. Raises DataError with the line of an error, unless the file `is_checked`: known to
    have none.
    """
    decoder = json.JSONDecoder() if is_checked else json.JSONDecoder(object_pairs_hook=_object, parse_float=_finite)
    is_empty = True
    try:
        with opened(path) as file:
            for number, line in enumerate(file, start=1):
                line = line.removeprefix(_BOM) if number == 1 else line
                if not line.strip():
                    continue
                if is_empty and line.strip() == b"null":
                    _fail(f"{path}, line {number}", "a row must be a JSON object, got null")
                if is_empty and (line.lstrip()[:1] == b"[" or _goes_on(line.decode().strip(), decoder)):
                    yield from _rows_of_whole(path, decoder, is_checked)
                    return
                is_empty = False
                for row, text in _values(line.decode(), 0, decoder, path, number):
                    yield row if is_checked else _checked(row, text, f"{path}, line {number}")
    except UnicodeDecodeError:
        read_text(path)  # raises
        raise
    if is_empty:
        raise DataError(f"{path}: the file is empty. {_ADVICE}")


def _goes_on(line: str, decoder: json.JSONDecoder) -> bool:
    """Whether an object that begins on a line has its end on a later one."""
    try:
        decoder.raw_decode(line)
    except json.JSONDecodeError as error:
        return line.startswith("{") and error.pos >= len(line) - 1  # a comma at the end may be at fault
    except (ValueError, RecursionError):
        return False
    return False


def _rows_of_whole(path: Path, decoder: json.JSONDecoder, is_checked: bool) -> Iterator[dict[str, Any]]:
    """The rows of a file that is not read by lines; those of a list are converted one at a time."""
    text = read_text(path).rstrip(" \t\r\n")  # an error at the end is in the last line
    is_list = text.lstrip().startswith("[")
    number = -1
    for number, (row, part) in enumerate(
        _values(text, text.index("[") + 1 if is_list else 0, decoder, path, None, is_list)
    ):
        row = {"text": row} if is_list and isinstance(row, str) else row
        yield row if is_checked else _checked(row, part, f"{path}, row {number}")
    if number < 0:
        raise DataError(f"{path}: the list of rows is empty. {_ADVICE}")


def _values(
    text: str, at: int, decoder: json.JSONDecoder, path: Path, line: int | None, is_list: bool = False
) -> Iterator[tuple[Any, str]]:
    """Each value of a text, from a character on, with its own text; `line` is the number of a text of one line.

    With `is_list`, the values are those of a list, which has begun; else they are separated by white space.
    """
    number, at = 0, _SPACE.match(text, at).end()
    while True:
        where = f"{path}, row {number}" if line is None else f"{path}, line {line}"
        if is_list and text[at : at + 1] == "]":
            if text[at + 1 :].strip():
                line = text.count("\n", 0, at) + 1
                _fail(f"{path}, line {line}", f"text after the end of the list: {_short(text[at + 1 :].strip())}")
            return
        if at == len(text):
            if is_list:
                _fail(f"{path}, after row {number - 1}", "the list of rows has no end, so the file may be cut off")
            return
        if is_list and number:
            if text[at] != ",":
                _fail(where, f"expected a comma between the rows of a list, got {_short(text[at : at + 60])}")
            at = _SPACE.match(text, at + 1).end()
        try:
            value, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            read_text(path)  # raises if it is not text
            where = f"{path}, line {error.lineno if line is None else line}"
            shown = "" if line is None else f": {_short(text.strip())}"
            _fail(where, f"not valid JSON ({error.msg} at column {error.colno}){shown}", error)
        except RecursionError as error:
            _fail(where, "nested too deeply", error)
        except ValueError as error:
            long = "set_int_max_str_digits" in str(error)  # the advice of Python
            _fail(where, "an integer has more than 4300 digits. Write it as a text" if long else str(error), error)
        yield {} if value is None else value, text[at:end]
        at, number = _SPACE.match(text, end).end(), number + 1


def _checked(row: Any, text: str, where: str) -> dict[str, Any]:
    """The row, given its text. Raises DataError if it is not an object, or contains a text that is none."""
    if not isinstance(row, dict):
        _fail(where, f"a row must be a JSON object, got {_short(text.strip())}")
    for key, value in row.items() if _SURROGATE.search(text) else ():
        try:
            json.dumps([key, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            problem = f"{key!r} contains {half}, half of a surrogate pair, which is not a character without the other"
            _fail(where, f"{problem} half. Write both halves, or remove it", error)
    return row


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
        raise ValueError(f"the key {twice!r} occurs {names.count(twice)} times in an object, so its value is ambiguous")
    return found


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {_short(digits)} is too large for a floating-point number")
    return value


def _fail(where: str, problem: str, error: Exception | None = None) -> NoReturn:
    raise DataError(f"{where}: {problem}. {_ADVICE}") from error


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


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

    `calls` is the name of tool calls in the data, if it is another one than that of chat templates.
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
