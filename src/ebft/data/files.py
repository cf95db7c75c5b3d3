"""Local files as datasets: JSON, CSV and Parquet as tables, text and source code with one document per file."""

import hashlib
import logging
import os
import re
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets, load_dataset
from datasets.data_files import DataFilesList

from ebft.data.added_keys import as_json
from ebft.data.diagnose import explain, header_problem
from ebft.data.file_hash import file_fingerprint
from ebft.data.json_files import read_json
from ebft.data.json_values import JsonText
from ebft.data.processes import raise_if_full
from ebft.data.splits import DEFAULT_SPLIT
from ebft.data.text_file import read_text
from ebft.errors import DataError, cause

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
# Formats that can run code when they are loaded; they are never read.
_PICKLES = {".pkl", ".pickle", ".pt", ".pth", ".bin", ".joblib", ".npy", ".npz"}
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".7z", ".tar", ".tgz"}
_STARTS = (b"\x1f\x8b", b"BZh91AY", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18", b"PK\x03\x04", b"7z\xbc\xaf")
# The readers also log each error that they raise, which is reported here with the file and line.
logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
_SPLIT_WORD = re.compile(
    r"(?:^|[/._-])(train(?:ing)?|test(?:ing)?|eval(?:uation)?|valid(?:ation)?|val|dev)(?=[/._-]|$)"
)
_SPLIT_NAMES = {"tr": "train", "te": "test", "ev": "validation", "va": "validation", "de": "validation"}


def read_files(files: list[Path], kind: str | None, source: str) -> Dataset:
    """Read `files` as one dataset, each in its own format or all as `kind` (a key of `KINDS`).

    A text file is one row with the columns `text` and `file`. Raises DataError for an unreadable file, with its name
    and if possible the line.
    """
    return _read_kinds(kinds_of(files, kind, source), source)


def read_folder(root: Path, kind: str | None, source: str) -> dict[str, Dataset]:
    """Read all files in `root` as `{split name: rows}`; see `read_files`.

    Tables and `.txt` files whose path relative to `root` contains the name of a split (`train.jsonl`,
    `data/test-0.parquet`) belong to that split, all other files to `train`.
    """
    return {split: _read_kinds(files, source) for split, files in files_by_split(root, kind, source).items()}


def files_by_split(root: Path, kind: str | None, source: str) -> dict[str, list[tuple[Path, str]]]:
    """The files that `read_folder` reads, with their formats, by the split that they belong to."""
    splits: dict[str, list[tuple[Path, str]]] = defaultdict(list)
    for path, file_kind in kinds_of(files_below(root), kind, source):
        splits[_split_of(path, root, file_kind)].append((path, file_kind))
    return splits


def files_below(root: Path) -> list[Path]:
    """All files in a folder and its subfolders in sorted order, except hidden files and Python byte code."""
    found = sorted(path for path in root.rglob("*") if path.is_file())
    hidden = lambda part: part.startswith(".") or part == "__pycache__"
    return [path for path in found if not any(hidden(part) for part in path.relative_to(root).parts)]


def kinds_of(files: list[Path], kind: str | None, source: str) -> list[tuple[Path, str]]:
    """Each file with its format; files of unknown format are skipped with one warning."""
    if kind is not None:
        _refuse_compressed(files if kind != "csv" else [], source)  # which datasets unpacks
        return [(path, kind) for path in files]
    known = {suffix: name for name, suffixes in KINDS.items() for suffix in suffixes}
    taken = [(path, known[path.suffix.lower()]) for path in files if path.suffix.lower() in known]
    left = Counter(path.suffix or "no extension" for path in files if path.suffix.lower() not in known)
    pickles = [path for path in files if path.suffix.lower() in _PICKLES]
    if pickles and not taken:
        raise DataError(
            f"{source}: {pickles[0].name} may be a pickle, which can run code when it is loaded, so it is not read. "
            "Save the rows as JSON lines or Parquet."
        )
    if not taken:
        _refuse_compressed(files, source)
        if not left:
            raise DataError(f"{source}: the folder has no files (hidden ones are not read). Correct the path.")
        seen = ", ".join(f"{suffix} x{count}" for suffix, count in left.items())
        raise DataError(
            f"{source}: no file of a known format (found {seen}). Set ds_type to one of "
            f"{', '.join(KINDS)}, for example `ds_type: text` for one document per file."
        )
    if left:
        seen = ", ".join(f"{suffix} x{count}" for suffix, count in left.items())
        warnings.warn(
            f"{source}: files of unknown format are skipped ({seen}). Set ds_type or data_files to read them.",
            stacklevel=2,
        )
    _refuse_compressed([path for path, found in taken if found != "csv"], source)
    return taken


def _refuse_compressed(files: list[Path], source: str) -> None:
    found = next((path for path in files if path.suffix.lower() in _COMPRESSED or _starts_compressed(path)), None)
    if found is not None:
        raise DataError(
            f"{source}: {found.name} is compressed; local files are read uncompressed. Unpack it, and set path to the "
            "unpacked file."
        )


def _starts_compressed(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(8).startswith(_STARTS)
    except OSError:
        return False  # reported when it is read


def _split_of(path: Path, root: Path, kind: str) -> str:
    """The split in the name of a file; names of source files do not indicate splits (`test.py` is code)."""
    if kind == "text" and path.suffix.lower() not in {".txt", ".text"}:
        return DEFAULT_SPLIT
    found = _SPLIT_WORD.search(path.relative_to(root).as_posix().lower())
    return _SPLIT_NAMES[found.group(1)[:2]] if found else DEFAULT_SPLIT


def _read_kinds(files: list[tuple[Path, str]], source: str) -> Dataset:
    by_kind: dict[str, list[Path]] = defaultdict(list)
    for path, kind in files:
        by_kind[kind].append(path)
    parts = [_read_texts(paths) if kind == "text" else _read_tables(kind, paths) for kind, paths in by_kind.items()]
    try:
        return concatenate_datasets(_with_json_columns(parts))
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{source}: a column has different types in its files ({cause(error)}). Use separate entries of datasets."
        ) from error


def _with_json_columns(parts: list[Dataset]) -> list[Dataset]:
    """The parts with JSON values in each column that has them in any part, so that files of other formats fit."""
    columns = {name for rows in parts for name, kind in rows.features.items() if isinstance(kind, JsonText)}
    return [as_json(rows, [name for name in rows.column_names if name in columns]) for rows in parts]


def _read_texts(paths: list[Path]) -> Dataset:
    return Dataset.from_dict({"text": [read_text(path) for path in paths], "file": [str(path) for path in paths]})


def _read_tables(kind: str, paths: list[Path]) -> Dataset:
    options, files = reader_options(kind, paths), exact_files(kind, paths)
    # The library caches tables by path and time, and would not notice a changed file whose time was preserved.
    contents = hashlib.sha256("".join(file_fingerprint(path) for path in paths).encode()).hexdigest()
    if kind == "json":
        return read_json({DEFAULT_SPLIT: [str(path) for path in paths]}, contents, DEFAULT_SPLIT)
    variable = next((path for path in map(os.path.abspath, paths) if os.path.expandvars(path) != path), None)
    if variable is not None:
        raise DataError(
            f"{variable}: the datasets library would replace the name of an environment variable in this path. Rename "
            "the file or the folder."
        )
    try:
        rows = load_dataset(kind, contents, data_files=files, split="train", **options)
        rows.data.validate(full=True)
        return rows
    except Exception as error:  # builders raise the errors of their parsers
        raise_if_full(error)
        raise DataError(explain(kind, paths, error)) from error


def exact_files(kind: str, paths: list[Path]) -> dict[str, DataFilesList]:
    """The argument `data_files` of `load_dataset` for files of a format, which takes paths for patterns otherwise.

    Raises DataError for a CSV file without a header or with two columns of the same name, and for a path that cannot
    be read.
    """
    tables = [path for path in paths if kind == "csv" and not _starts_compressed(path)]
    problem = next(filter(None, map(header_problem, tables)), None)
    if problem:
        raise DataError(problem)
    names = [os.path.abspath(path) for path in paths]
    chained = next((name for name in names if "::" in name), None)
    if chained is not None:
        raise DataError(
            f"{chained}: the datasets library reads a path with '::' as a file within an archive. Rename the file or "
            "the folder."
        )
    return {"train": DataFilesList(names, [])}


def reader_options(kind: str, paths: list[Path]) -> dict[str, Any]:
    """Arguments of the reader of a format: a text is one row, and only empty fields of tables are missing values."""
    if kind == "text":
        return {"sample_by": "document"}
    if kind != "csv":
        return {}
    options: dict[str, Any] = {"keep_default_na": False, "na_values": [""]}  # NA and null are texts
    return options | ({"sep": "\t"} if all(path.suffix.lower() == ".tsv" for path in paths) else {})
