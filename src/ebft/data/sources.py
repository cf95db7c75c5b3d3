"""The raw rows of a `datasets:` entry: from the Hub, from local files and folders, or from `save_to_disk`."""

import hashlib
import json
import logging
import os
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from glob import glob
from pathlib import Path, PurePosixPath
from typing import Any

from datasets import (
    Dataset,
    DatasetBuilder,
    DatasetDict,
    ReadInstruction,
    concatenate_datasets,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)
from datasets.data_files import DataFilesList
from huggingface_hub import snapshot_download

from ebft.data.diagnose import explain, header_problem
from ebft.data.json_files import JsonText, as_json, read_json
from ebft.data.locate import locate
from ebft.data.tables import raise_if_full
from ebft.data.transforms import reads_lines
from ebft.errors import DataError, cause, shortened
from ebft.files import LARGEST_HASHED, file_fingerprint, read_text


def read_source(entry: Any) -> Dataset:
    """The raw rows of a dataset entry (`path`, `name`, `split`, `data_files`, `ds_type`, `revision`, `shards`).

    `path` may be a file, a folder of files, a `save_to_disk` folder, a URL, a Hub id, or a format (`json`, `text`)
    with `data_files`. Raises DataError that names the file and row, or the missing path.
    """
    rows = _read_all(entry)
    if entry.shards is None:
        return rows
    if entry.shards > len(rows):
        raise DataError(f"{entry.path}: shards: {entry.shards} is more than its {len(rows)} rows. Lower shards.")
    return rows.shard(entry.shards, entry.shards_idx, contiguous=False)


def _read_all(entry: Any) -> Dataset:
    if is_url(entry.path):
        return read_remote(entry)
    if names_a_format(entry):
        return _read_local(Path.cwd(), entry, kind=entry.ds_type or entry.path)
    path = local_path(entry)
    if path is None:
        return _read_hub(entry)
    if reads_lines(entry.type):
        return _read_lines(path, entry)
    if path.is_dir() and saved_to_disk(path):
        return _read_saved(path, entry)
    return _read_local(path, entry, kind=entry.ds_type)


def local_path(entry: Any) -> Path | None:
    """The path of an entry, None for a Hub id; with one warning for keys that only apply to the Hub.

    Raises DataError as `locate` does.
    """
    path = locate(entry.path, "dataset", "datasets.path")
    unread = [key for key in ("name", "revision") if getattr(entry, key) is not None]
    if path is not None and unread:
        warnings.warn(
            f"datasets: {' and '.join(f'{key}: {getattr(entry, key)}' for key in unread)} has no effect, since path: "
            f"{entry.path} is on this machine, not on the Hub. All rows of its split {entry.split} are read.",
            stacklevel=2,
        )
    return path


def source_files(entry: Any) -> list[tuple[str, Path]] | None:
    """The files that `read_source` reads, in order, with their names within `path`; None for the Hub and for URLs.

    Raises DataError as `read_source` does.
    """
    if is_url(entry.path):
        return None
    path = Path.cwd() if names_a_format(entry) else locate(entry.path, "dataset", "datasets.path")
    if path is None:
        return None
    folder = path if path.is_dir() else path.parent
    if entry.data_files:
        patterns = entry.data_files.values() if isinstance(entry.data_files, dict) else [entry.data_files]
        files = [file for given in patterns for file in (_matches(folder, given, entry.path) if given else [path])]
    else:
        files = files_below(path) if path.is_dir() else [path]
    return [(str(file.relative_to(folder) if file.is_relative_to(folder) else file), file) for file in files]


def names_a_format(entry: Any) -> bool:
    return entry.path in KINDS and bool(entry.data_files) and not Path(entry.path).exists()


def _read_lines(path: Path, entry: Any) -> Dataset:
    """The non-empty lines of a file, in a column `line`, for transforms that parse them."""
    if not path.is_file() or entry.data_files:
        raise DataError(f"{entry.path}: type {entry.type} reads a single JSONL file. Set path to the file.")
    lines = [line for line in read_text(path).split("\n") if line.strip()]
    return take_split({DEFAULT_SPLIT: Dataset.from_dict({"line": lines})}, entry.split, entry.path)


def saved_to_disk(path: Path) -> bool:
    return (path / "state.json").exists() or (path / "dataset_dict.json").exists()


def _read_saved(path: Path, entry: Any) -> Dataset:
    return take_split(saved_parts(path), entry.split, entry.path)


def saved_parts(path: Path) -> dict[str, Dataset]:
    """The splits of a `save_to_disk` folder, whose rows are read from disk as they are needed."""
    try:
        saved = load_from_disk(str(path))
    except Exception as error:  # Arrow and JSON readers raise many types of errors
        raise DataError(f"{path}: this save_to_disk folder cannot be read ({cause(error)}).") from error
    return dict(saved) if isinstance(saved, DatasetDict) else {str(saved.split or DEFAULT_SPLIT): saved}


def _read_local(path: Path, entry: Any, kind: str | None) -> Dataset:
    if path.is_dir() and not entry.data_files:
        return take_split(read_folder(path, kind, entry.path), entry.split, entry.path)
    parts = {split: read_files(files, kind, entry.path) for split, files in named_files(path, entry).items()}
    return take_split(parts, entry.split, entry.path)


def named_files(path: Path, entry: Any) -> dict[str, list[Path]]:
    """The file of an entry, or those of its `data_files`, by the split that they belong to."""
    # Files given by the user are the train split, regardless of their names (test.jsonl for evaluation).
    named = entry.data_files if isinstance(entry.data_files, dict) else {DEFAULT_SPLIT: entry.data_files}
    folder = path if path.is_dir() else path.parent
    return {split: _matches(folder, patterns, entry.path) if patterns else [path] for split, patterns in named.items()}


def _matches(folder: Path, patterns: str | list[str], source: str) -> list[Path]:
    """The files in `folder` that match each pattern (a path or a glob), in order."""
    files: list[Path] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        given = folder / os.path.expanduser(pattern)
        names = sorted(glob(os.path.expanduser(pattern), root_dir=folder, recursive=True))
        found = [given] if given.is_file() else [folder / name for name in names if (folder / name).is_file()]
        if not found:
            raise DataError(f"{source}: data_files {shortened(pattern)!r} matches no file in {folder}.")
        files += found
    return files


def _read_hub(entry: Any) -> Dataset:
    try:
        return load_dataset(
            entry.path,
            entry.name,
            split=entry.split,
            data_files=entry.data_files,
            revision=entry.revision,
        )
    except Exception as error:  # Hub, builder and parser errors have no common base class
        raise DataError(
            f"datasets.path: {entry.path!r} was interpreted as a Hub id and could not be loaded: {cause(error)} "
            "(name, split, revision and data_files of the entry are passed to load_dataset unchanged)."
        ) from error


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


_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")


def is_url(path: str) -> bool:
    """Whether a path is a URL, such as `s3://bucket/rows.jsonl`."""
    return _URL.match(path) is not None


def read_remote(entry: Any) -> Dataset:
    """The rows of the files at the URL `path`, or of `data_files` below it.

    Raises DataError that names the URL, and the package to install if its kind of storage needs one.
    """
    parts = {}
    for split, urls in _files(entry).items():
        builder = _builder(urls, entry)
        try:
            if (entry.ds_type or _kind(urls[0])) == "json":
                version = hashlib.sha256(builder.cache_dir.encode()).hexdigest()  # that of the files is in its name
                parts[split] = read_json({DEFAULT_SPLIT: urls}, version, DEFAULT_SPLIT)
                continue
            builder.download_and_prepare()
            parts[split] = builder.as_dataset(split="train")
        except DataError as error:
            raise DataError(f"{', '.join(urls)}: {error}") from error
        except Exception as error:  # of the package of the storage, or of the parser
            raise _unreadable(urls, error) from error
    return take_split(parts, entry.split, entry.path)


def remote_builders(entry: Any) -> dict[str, DatasetBuilder]:
    """The readers of the files at the URL of an entry, by split; nothing is downloaded yet."""
    return {split: _builder(urls, entry) for split, urls in _files(entry).items()}


def remote_fingerprint(entry: Any) -> list[list[str]]:
    """The URLs of each split, and a hash of them and of the version of each file (ETag or time, if there is one)."""
    found = []
    for urls in _files(entry).values():
        folder = Path(_builder(urls, entry).cache_dir)  # its name contains the hash
        found.append([*urls, "/".join(folder.parts[-3:])])
    return found


def _files(entry: Any) -> dict[str, list[str]]:
    named = entry.data_files if isinstance(entry.data_files, dict) else {DEFAULT_SPLIT: entry.data_files}
    return {split: list(_urls(entry.path, given)) for split, given in named.items()}


def _urls(path: str, patterns: Any) -> Iterator[str]:
    if patterns is None:
        yield path
        return
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        yield pattern if is_url(pattern) else f"{path.rstrip('/')}/{pattern}"


def _builder(urls: list[str], entry: Any) -> DatasetBuilder:
    kind = entry.ds_type or _kind(urls[0])
    options = {"sample_by": "document"} if kind == "text" else {}
    try:
        return load_dataset_builder(kind, data_files=urls, **options)
    except ImportError as error:  # its message says which package to install
        raise DataError(f"datasets.path: {', '.join(urls)} needs another package: {cause(error)}.") from error
    except Exception as error:  # of the package of the storage
        raise _unreadable(urls, error) from error


def _unreadable(urls: list[str], error: Exception) -> DataError:
    return DataError(
        f"datasets.path: {', '.join(urls)} cannot be read ({cause(error)}). Check the URL, the network, and the "
        "credentials in the environment."
    )


def _kind(url: str) -> str:
    suffix = PurePosixPath(url.partition("?")[0]).suffix.lower()
    for kind, suffixes in KINDS.items():
        if suffix in suffixes:
            return kind
    raise DataError(f"datasets.path: the format of {url} is not known. Set ds_type to one of {', '.join(KINDS)}.")


DEFAULT_SPLIT = "train"


def take_split(parts: dict[str, Dataset], spec: str, source: str) -> Dataset:
    """The rows that `spec` selects from the named splits in `parts`.

    Slices work as in the datasets library: percentages are rounded to the nearest row, bounds past the end are clipped.
    Raises DataError for an unknown split, a malformed slice or a slice without rows.
    """
    sizes = {name: len(part) for name, part in parts.items()}
    try:
        spans = ReadInstruction.from_spec(spec).to_absolute(sizes)
    except (ValueError, AssertionError) as error:
        raise DataError(
            f"{source}: invalid split {spec!r}: {error}. Available splits: {', '.join(sizes)}. "
            "Slices are written train[:100], train[10:20] or train[:1%]."
        ) from error
    # A slice from past the end is not clipped by the datasets library.
    ranges = [(span.splitname, range(*slice(span.from_, span.to).indices(sizes[span.splitname]))) for span in spans]
    chosen = [parts[name].select(rows) for name, rows in ranges if len(rows)]
    if len(chosen) < len(ranges):
        held = ", ".join(f"{name} has {size} rows" for name, size in sizes.items())
        part = "" if len(ranges) == 1 else "a part of "
        raise DataError(f"{source}: {part}split {spec!r} selects no rows ({held}). Widen the slice.")
    return concatenate_datasets(chosen) if len(chosen) > 1 else chosen[0]


def source_fingerprint(entry: Any) -> dict[str, Any]:
    """The contents of the files of a dataset entry, the commit of a dataset of the Hub, or the versions of URLs.

    Raises DataError if the source does not exist.
    """
    if is_url(entry.path):
        return {"remote": remote_fingerprint(entry)}
    files = source_files(entry)
    if files is None:
        return {"hub": hub_commit(entry)}
    return {"files": [[name, file_fingerprint(path)] for name, path in files]}


def content_digest(entry: Any) -> str | None:
    """A hash of the files of a dataset entry; None for the Hub and URLs, for over `LARGEST_HASHED` bytes, or if
    unreadable.
    """
    try:
        files = source_files(entry)
        if files is None or sum(path.stat().st_size for _, path in files) > LARGEST_HASHED:
            return None
        found = [file_fingerprint(path) for _, path in files]
    except (DataError, OSError):
        return None
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def hub_commit(entry: Any) -> str:
    """The commit of the entry's revision, of the Hub or of its local cache."""
    try:
        folder = snapshot_download(entry.path, repo_type="dataset", revision=entry.revision, allow_patterns=[])
    except Exception:  # not in the cache of files, but possibly in that of loaded datasets; else this raises DataError
        return read_source(entry)._fingerprint
    return Path(folder).name
