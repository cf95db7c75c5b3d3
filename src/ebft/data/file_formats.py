"""Files of data: their formats and splits, and their rows."""

import csv
import hashlib
import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path, PurePath
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset, Features, Value, concatenate_datasets, load_dataset
from datasets.data_files import DataFilesList

from ebft.data.json_files import JsonText, as_json, read_json
from ebft.data.tables import reading
from ebft.errors import DataError, doing, shortened, warn
from ebft.files import PACKED, file_fingerprint, is_pointer, opened, read_text

DEFAULT_SPLIT = "train"
_TEXT = (
    ".txt .text .md .rst .tex .html .xml .py .pyi .ipynb .c .h .cc .cpp .cxx .hpp .cu .java .kt .scala "
    ".js .jsx .ts .tsx .go .rs .rb .php .pl .lua .r .jl .hs .ml .swift .cs .sh .sql .yaml .yml .toml"
)
# Formats and their file extensions.
KINDS = {
    "json": {".json", ".jsonl", ".ndjson"},
    "csv": {".csv", ".tsv"},
    "parquet": {".parquet"},
    "arrow": {".arrow"},
    "text": set(_TEXT.split()),
}
_UNPACKED = ("json", "text", "csv")  # formats whose files can be compressed
_STARTS = (b"\x1f\x8b", b"BZh91AY", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18", b"PK\x03\x04", b"7z\xbc\xaf")
# The readers also log each error that they raise, which is reported here with the file and line.
logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
_SPLIT_WORD = re.compile(
    r"(?:^|[/._-])(train(?:ing)?|test(?:ing)?|eval(?:uation)?|valid(?:ation)?|val|dev)(?=[/._-]|$)"
)
# A part of a split with a longer name, such as train_sft-00000-of-00002.parquet, as the Hub names its files.
_SHARD = re.compile(r"((?:train|test|validation|val|dev)[_.]\w+(?:\.\w+)*)-\d{5}-of-\d{5,}\.")
_LOADS_ROWS = re.compile(r"^class \w+\(.*\b(?:Generator|Arrow|Beam)BasedBuilder\b", re.MULTILINE)  # of datasets
_SPLIT_NAMES = {"tr": "train", "te": "test", "ev": "validation", "va": "validation", "de": "validation"}


def files_by_split(root: Path, kind: str | None, source: str) -> dict[str, list[tuple[Path, str]]]:
    """All files in `root` with their formats, by the split that they belong to.

    Tables and `.txt` files whose path relative to `root` contains the name of a split (`train.jsonl`,
    `data/test-0.parquet`) belong to that split, all other files to `train`: `test.py` is code. Raises DataError for the
    folder of a loading script.
    """
    for script in root.glob("*.py") if kind is None else ():
        if _LOADS_ROWS.search(script.read_text(encoding="utf-8", errors="replace")):
            raise DataError(
                f"{source}: the rows of this dataset are made by its loading script {script.name}, which is not run. "
                "Save them as JSON lines or Parquet, or name files in data_files. ds_type: text reads it as text."
            )
    splits: dict[str, list[tuple[Path, str]]] = defaultdict(list)
    for path, file_kind in kinds_of(files_below(root), kind, source):
        can_name_one = file_kind != "text" or _ending(path) in {".txt", ".text"}
        found = _SPLIT_WORD.search(path.relative_to(root).as_posix().lower()) if can_name_one else None
        split = _SPLIT_NAMES[found.group(1)[:2]] if found else DEFAULT_SPLIT
        shard = _SHARD.match(path.name)
        splits[shard.group(1) if shard else split].append((path, file_kind))
    return splits


def warn_of_other_splits(files: dict[str, list[tuple[Path, str]]], wanted: str, root: Path) -> None:
    """Warn of files of other splits than `wanted` whose names do not start with theirs, unless each that is read names
    its own: a document can be called the-test-of-time.txt, and a table unit-test-gen.jsonl."""
    named = {part.partition("[")[0].strip() for part in wanted.split("+")}
    read = [path for split, some in files.items() if split in named for path, _ in some]
    others = ((split, path) for split, some in files.items() if split not in named for path, _ in some)
    parts = lambda path: path.relative_to(root).as_posix().lower().split("/")
    left = [f"{path.name} ({split})" for split, path in others if not any(map(_SPLIT_WORD.match, parts(path)))]
    if left and not all(any(map(_SPLIT_WORD.search, parts(path))) for path in read):
        warn(
            f"{root}: files are not read, since their names belong to another split than {wanted}: "
            f"{shortened(', '.join(left))}. Name them in data_files if they are not of that split."
        )


def files_below(folder: Path, above: tuple[Path, ...] = ()) -> list[Path]:
    """All files in a folder and its subfolders in sorted order, except hidden files and Python byte code.

    Symbolic links are followed, but not to a folder that the link is in: to one of the folders `above`.
    """
    inside = (*above, folder.resolve())
    with doing(f"reading the folder {folder}"):
        found = [path for path in folder.iterdir() if not path.name.startswith(".") and path.name != "__pycache__"]
    folders = (path for path in found if path.is_dir() and path.resolve() not in inside)
    below = (file for path in folders for file in files_below(path, inside))
    return sorted([*below, *(path for path in found if path.is_file())])


def kinds_of(files: list[Path], kind: str | None, source: str) -> list[tuple[Path, str]]:
    """Each file with its format; files of unknown format are skipped with one warning."""
    refuse_pointers(files, source)
    if kind is not None:
        return [(path, kind) for path in files]
    found = [(path, kind_of(path.name)) for path in files]
    taken = [(path, kind) for path, kind in found if kind is not None]
    left = Counter(path.suffix or "no extension" for path, kind in found if kind is None)
    seen = ", ".join(f"{suffix} x{count}" for suffix, count in left.items())
    if not taken:
        raise DataError(
            f"{source}: no file of a known format (found {seen or 'none; hidden ones are not read'}). Set ds_type to "
            f"one of {', '.join(KINDS)}, for example `ds_type: text` for one document per file."
        )
    if left:
        warn(f"{source}: files of unknown format are skipped ({seen}). Set ds_type or data_files to read them.")
    return taken


def kind_of(name: str) -> str | None:
    """The format of a file by its name; None if it is not known."""
    ending = _ending(name)
    found = next((kind for kind, suffixes in KINDS.items() if ending in suffixes), None)
    return found if found in _UNPACKED or ending == PurePath(name).suffix.lower() else None


def _ending(name: str | PurePath) -> str:
    """The extension of a file, without the one of a compression that is unpacked."""
    path = PurePath(name)
    return PurePath(path.stem if path.suffix.lower() in PACKED else path).suffix.lower()


def refuse_pointers(files: Iterable[Path], source: str) -> None:
    """Raise DataError for a file that Git LFS has not downloaded, which would be read as a text."""
    for path in files:
        if is_pointer(path):
            raise DataError(f"{source}: {path.name} is a pointer of Git LFS to another file. Run `git lfs pull`.")


def read_files(files: list[tuple[Path, str]], source: str) -> Dataset:
    """Read files, given with their formats, as one dataset.

    A text file is one row with the columns `text` and `file`. Raises DataError for an unreadable file, with its name
    and if possible the line.
    """
    by_kind: dict[tuple[str, bool], list[Path]] = defaultdict(list)
    for path, kind in files:
        by_kind[kind, _ending(path) == ".tsv"].append(path)
    read: dict[str, list[Dataset]] = defaultdict(list)
    for (kind, _), paths in by_kind.items():
        read[kind].append(_read_kind(kind, paths))
    with doing(f"joining the rows of the files of {source}"):
        joined = {kind: concatenate_datasets(parts) for kind, parts in read.items()}
        parts = [typed(rows) if kind == "csv" else rows for kind, rows in joined.items()]
        # JSON values in each column that has them in any part, so that files of other formats fit.
        columns = {name for rows in parts for name, kind in rows.features.items() if isinstance(kind, JsonText)}
        return concatenate_datasets(
            [as_json(rows, [name for name in rows.column_names if name in columns]) for rows in parts]
        )


def _read_kind(kind: str, paths: list[Path]) -> Dataset:
    if kind == "text":
        return Dataset.from_list(list(text_rows(paths)))
    # The library caches tables by path and time, and would not notice a changed file whose time was preserved.
    contents = hashlib.sha256("".join(file_fingerprint(path) for path in paths).encode()).hexdigest()
    if kind == "json":
        return read_json(list(map(str, paths)), contents)
    with reading(f"{shortened(', '.join(map(str, paths)))} as {kind}"):
        rows = load_dataset(kind, contents, split="train", **reader_arguments(kind, paths))
        rows.data.validate(full=True)
        return rows


def text_rows(paths: Iterable[Path]) -> Iterator[dict[str, str]]:
    for path in paths:
        yield {"text": read_text(path), "file": str(path)}


def reader_arguments(kind: str, paths: list[Path]) -> dict[str, Any]:
    """Arguments of `load_dataset` for files of a format on this machine, whose paths it takes for patterns otherwise.

    Raises DataError for a CSV file with two columns of the same name, or with more fields below the header than in it.
    """
    starts = {}
    for path in paths if kind == "csv" else ():
        with path.open("rb") as file:  # not of one that is compressed in a way that its name does not say
            if path.suffix.lower() in PACKED or not file.read(max(map(len, _STARTS))).startswith(_STARTS):
                starts[str(path)] = header_and_first_row(path)
    header = check_starts(starts)
    files = {"train": DataFilesList([os.path.abspath(path) for path in paths], [])}
    return {"data_files": files, **reader_options(kind, paths, header)}


def reader_options(kind: str, paths: Sequence[PurePath], header: list[str] | None) -> dict[str, Any]:
    """Arguments of the reader of a format: a text is one row, and only empty fields of tables are missing values.

    All fields of tables are read as text, since the reader would guess types for some rows at a time. `header`: the
    columns of a table, if they are known.
    """
    if kind == "text":
        return {"sample_by": "document", "encoding": "utf-8-sig"}
    if kind != "csv":
        return {}
    options: dict[str, Any] = {"keep_default_na": False, "na_values": [""]}  # NA and null are texts
    if header is not None:
        names = [name or f"Unnamed: {number}" for number, name in enumerate(header)]  # as the reader names them
        options["features"] = Features({name: Value("string") for name in names})
    has_tabs = {_ending(path) == ".tsv" for path in paths}
    if len(has_tabs) > 1:
        raise DataError(f"{paths[0].parent}: .tsv and other tables need separate entries of datasets")
    return options | ({"sep": "\t"} if True in has_tabs else {})


# The fields of a column whose values are numbers or truth values, if all of its fields are like this; 007 is a text.
_TYPES = {
    "int64": r"^-?(0|[1-9]\d{0,17})$",
    "float64": r"^-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?$",
    "bool": r"^([Tt]rue|TRUE|[Ff]alse|FALSE)$",
}


def typed(rows: Dataset) -> Dataset:
    """The rows of a CSV file with numbers and truth values in the columns that have nothing else."""
    found = {}
    for name in rows.column_names:
        texts = rows.data.column(name).drop_null()
        matches = lambda pattern, texts=texts: pc.all(pc.match_substring_regex(texts, pattern)).as_py()
        kind = next((kind for kind, pattern in _TYPES.items() if len(texts) and matches(pattern)), None)
        found |= {} if kind is None else {name: Value(kind)}
    return rows.cast(Features({**rows.features, **found})) if found else rows


def check_starts(starts: dict[str, tuple[list[str], list[str]]]) -> list[str] | None:
    """Check headers and first rows of CSV files by name; the header of the first, whose columns all must have.

    Raises DataError for what the reader would change or leave out: a column twice would be renamed, and the first field
    of a row with more fields than the header would be taken for an index.
    """
    header = None
    for name, (columns, row) in starts.items():
        header, problem = header or columns, ""
        twice = next((column for column in columns if column and columns.count(column) > 1), None)
        if twice is not None:
            problem = f": the column {twice!r} occurs {columns.count(twice)} times. Rename one."
        elif len(row) > len(columns):
            problem = f", line 2: {len(row)} fields, but the header has {len(columns)}. Correct the file."
        elif set(columns) != set(header):  # the reader would leave out the others
            problem = f": its columns are {', '.join(columns)}, but the columns of the first file are "
            problem += f"{', '.join(header)}. Use separate entries of datasets."
        if problem:
            raise DataError(f"{name}{problem}")
    return header


def header_and_first_row(path: PurePath, file: Any = None) -> tuple[list[str], list[str]]:
    """The header of a CSV file and the first row below it, empty if there is none.

    `file`: its open bytes, if `path` is only its name.
    """
    csv.field_size_limit(2**31 - 1)  # for the whole process
    with nullcontext(file) if file is not None else opened(Path(path)) as source:
        lines = TextIOWrapper(source, encoding="utf-8-sig", errors="replace", newline="")
        reader = csv.reader(lines, delimiter="\t" if _ending(path) == ".tsv" else ",")
        header, first = islice(chain(filter(None, reader), ([], [])), 2)
        return header, first
