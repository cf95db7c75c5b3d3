"""The raw rows of a `datasets:` entry: from the Hub, from local files and folders, or from `save_to_disk`."""

import hashlib
import json
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from glob import glob
from pathlib import Path, PurePosixPath
from typing import Any

import datasets
import fsspec
import numpy as np
from datasets import Dataset
from huggingface_hub import snapshot_download

from ebft.catalog import locate
from ebft.data import file_formats
from ebft.data.json_files import read_json
from ebft.data.repositories import card_of, is_repository, repository_of
from ebft.data.transforms import built_in
from ebft.errors import DataError, doing, shortened, warn
from ebft.files import LARGEST_HASHED, file_fingerprint, read_text


def read_source(entry: Any) -> Dataset:
    """The raw rows of a dataset entry (`path`, `name`, `split`, `data_files`, `ds_type`, `revision`, `shards`).

    `path` may be a file, a folder of files, a `save_to_disk` folder, a URL, a Hub id, or a format (`json`, `text`)
    with `data_files`. Raises DataError that names the file and row, or the missing path.
    """
    rows = _read_all(entry)
    if entry.shards is not None and entry.shards > len(rows):
        raise DataError(f"{entry.path}: shards: {entry.shards} is more than its {len(rows)} rows.")
    return rows if entry.shards is None else rows.shard(entry.shards, entry.shards_idx, contiguous=False)


class RawRows:
    """The raw rows of all dataset entries as one sequence; `parts` are the rows of each, `firsts` where they begin."""

    def __init__(self, entries: Sequence[Any], parts: Sequence[Dataset]) -> None:
        self._entries, self._parts = entries, parts
        self.firsts = [0, *np.cumsum([len(part) for part in parts]).tolist()]

    def __len__(self) -> int:
        return self.firsts[-1]

    def __getitem__(self, document: int) -> dict[str, Any]:
        number, row = self._find(document)
        return self._parts[number][row]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for part in self._parts:
            for batch in part.iter(batch_size=1000):
                names = list(batch)
                yield from (dict(zip(names, values)) for values in zip(*batch.values()))

    def place(self, document: int) -> str:
        """Where a document is, for messages: the file of a text of a folder, else the source and its row."""
        number, row = self._find(document)
        return row_place(self._parts[number][row], row, f"{self._entries[number].path}, {self._entries[number].split}")

    @cached_property
    def with_text(self) -> np.ndarray:
        """Which documents have text; all documents if none has, such as rows of numbers that a transform reads."""
        found = np.fromiter(map(has_text, self), dtype=bool, count=len(self))
        return found if found.any() else ~found

    def held_out(self, size: float, seed: int) -> np.ndarray:
        """The documents that `val_set_size: size` holds out: a fraction of the documents with text, or a number.

        At least one, and none without text as long as there are others, such as an empty file. They are selected among
        all other documents, usable or not: methods that drop different ones hold out the same ones.
        """
        count = max(1, round(size * self.with_text.sum())) if size < 1 else int(size)
        order = np.random.default_rng(seed).permutation(len(self))
        first = self.with_text[order]
        return np.concatenate([order[first], order[~first]])[:count]

    def _find(self, document: int) -> tuple[int, int]:
        number = bisect_right(self.firsts, document) - 1
        return number, document - self.firsts[number]


def row_place(row: Mapping[str, Any], number: int, source: str) -> str:
    """Where a raw row is, for messages: the file of a text of a folder, else its number in the source."""
    return f"{source}, row {number}" if (file := file_of(row)) is None else file


def file_of(row: Mapping[str, Any]) -> str | None:
    """The file of a row that is the text of one."""
    return row["file"] if set(row) == {"text", "file"} and isinstance(row["file"], str) else None


# Columns and keys of messages whose values are not text of the document.
NOT_TEXT = frozenset({"id", "_id", "uuid", "file", "url", "role", "from"})


def has_text(value: Any, is_item: bool = False) -> bool:
    """Whether a row, or a value in it, has a text that is not blank, or a list of other values, such as token ids."""
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, Mapping):
        return any(has_text(item) for name, item in value.items() if name not in NOT_TEXT)
    if isinstance(value, list | tuple):
        return any(has_text(item, is_item=True) for item in value)
    return is_item and value is not None


def _read_all(entry: Any) -> Dataset:
    if is_url(entry.path):
        return read_remote(entry)
    path = local_path(entry)
    if path is None:
        return load_hub(entry)
    if built_in(entry.type) == "nemo_gym.transform":  # which receives lines: a table would change their values
        if entry.data_files or not path.is_file():
            raise DataError(f"{entry.path}: type: {entry.type} reads one JSONL file, without data_files.")
        lines = [line for line in read_text(path).split("\n") if line.strip()]
        return take_split({file_formats.DEFAULT_SPLIT: Dataset.from_dict({"line": lines})}, entry.split, entry.path)
    if saved_to_disk(path) and not names_a_format(entry):
        return take_split(saved_parts(path), entry.split, entry.path)
    found = repository_of(path, entry) if path.is_dir() else None
    if found is not None:
        names = dict.fromkeys(part.partition("[")[0].strip() for part in entry.split.split("+"))
        return take_split({name: found.rows(name) for name in names}, entry.split, entry.path)
    parts = {split: file_formats.read_files(files, entry.path) for split, files in local_files(path, entry).items()}
    return take_split(parts, entry.split, entry.path)


def local_path(entry: Any) -> Path | None:
    """The path of an entry, None for a Hub id; with one warning for keys that only apply to the Hub.

    Raises DataError as `locate` does.
    """
    if names_a_format(entry):
        return Path.cwd()
    path = locate(entry.path, "dataset", "datasets.path")
    unread = [key for key in ("name", "revision") if getattr(entry, key) is not None]
    if path is not None and "name" in unread and not entry.data_files and is_repository(path):
        unread.remove("name")
    if path is not None and unread:
        warn(
            f"datasets: {' and '.join(f'{key}: {getattr(entry, key)}' for key in unread)} has no effect, since path: "
            f"{entry.path} is on this machine, not on the Hub. All rows of its split {entry.split} are read."
        )
    return path


def local_files(path: Path, entry: Any) -> dict[str, list[tuple[Path, str]]]:
    """The files of an entry at `path`, with their formats, by the split that they belong to."""
    kind = entry.ds_type or (entry.path if names_a_format(entry) else None)
    if not path.is_dir() or entry.data_files:
        return {
            split: file_formats.kinds_of(files, kind, entry.path) for split, files in named_files(path, entry).items()
        }
    found = file_formats.files_by_split(path, kind, entry.path)
    file_formats.warn_of_other_splits(found, entry.split, path)
    return found


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
    found = repository_of(path, entry) if path.is_dir() and not saved_to_disk(path) else None
    if found is None and path.is_dir() and not entry.data_files:
        files = file_formats.files_below(path)
    else:
        folder = folder if found is None else folder.resolve()
        files = sum((named_files(path, entry) if found is None else found.files).values(), [])
    return [(str(file.relative_to(folder) if file.is_relative_to(folder) else file), file) for file in files]


def names_a_format(entry: Any) -> bool:
    return entry.path in file_formats.KINDS and bool(entry.data_files) and not Path(entry.path).exists()


def saved_to_disk(path: Path) -> bool:
    return (path / "state.json").exists() or (path / "dataset_dict.json").exists()


def saved_parts(path: Path) -> dict[str, Dataset]:
    """The splits of a `save_to_disk` folder, whose rows are read from disk as they are needed."""
    with doing(f"reading the save_to_disk folder {path}"):
        saved = datasets.load_from_disk(str(path))
    return dict(saved) if isinstance(saved, dict) else {str(saved.split or file_formats.DEFAULT_SPLIT): saved}


def named_files(path: Path, entry: Any) -> dict[str, list[Path]]:
    """The file of an entry, or its `data_files`, by the split that they belong to."""
    folder = path if path.is_dir() else path.parent
    return {
        split: _matches(folder, given, entry.path) if given else [path] for split, given in _by_split(entry).items()
    }


def _by_split(entry: Any) -> dict[str, Any]:
    """The `data_files` of each split: those without one are for training, whatever their names (test.jsonl) say."""
    return entry.data_files if isinstance(entry.data_files, dict) else {file_formats.DEFAULT_SPLIT: entry.data_files}


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


def load_hub(entry: Any, streaming: bool = False) -> Any:
    """The rows of a dataset of the Hub; with `streaming`, they are read as they are needed."""
    options = {"split": entry.split, "data_files": entry.data_files, "revision": entry.revision}
    with doing(f"loading datasets.path: {entry.path} from the Hub"):
        return datasets.load_dataset(entry.path, entry.name, **options, **({"streaming": True} if streaming else {}))


def is_url(path: str) -> bool:
    """Whether a path is a URL, such as `s3://bucket/rows.jsonl`."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+://", path) is not None


def read_remote(entry: Any) -> Dataset:
    """The rows of the files at the URL `path`, or of `data_files` below it."""
    parts = {}
    for split, urls in _files(entry).items():
        builder, kind = _builder(urls, entry), entry.ds_type or _kind(urls[0])
        with doing(f"reading datasets.path: {', '.join(urls)}"):
            if kind == "json":
                version = hashlib.sha256(builder.cache_dir.encode()).hexdigest()  # has the version of the files
                parts[split] = read_json(urls, version)
                continue
            builder.download_and_prepare()
            parts[split] = builder.as_dataset(split="train")
            parts[split] = file_formats.typed(parts[split]) if kind == "csv" else parts[split]
    return take_split(parts, entry.split, entry.path)


def remote_builders(entry: Any) -> dict[str, datasets.DatasetBuilder]:
    """The readers of the files at the URL of an entry, by split; nothing is downloaded yet."""
    return {split: _builder(urls, entry) for split, urls in _files(entry).items()}


def _files(entry: Any) -> dict[str, list[str]]:
    below = lambda name: name if is_url(name) else f"{entry.path.rstrip('/')}/{name}"
    named = {split: [given] if isinstance(given, str) else given for split, given in _by_split(entry).items()}
    return {split: [entry.path] if given is None else list(map(below, given)) for split, given in named.items()}


def _builder(urls: list[str], entry: Any) -> datasets.DatasetBuilder:
    kind = entry.ds_type or _kind(urls[0])
    names = [PurePosixPath(url.partition("?")[0]) for url in urls]
    header = None
    with doing(f"reading datasets.path: {', '.join(urls)}"):
        if kind == "csv":
            starts = {}
            for each in fsspec.open_files(urls, "rb", compression="infer"):
                name = PurePosixPath(each.path.partition("?")[0])
                with each as file:
                    starts[each.full_name] = file_formats.header_and_first_row(name, file)
            header = file_formats.check_starts(starts)
        return datasets.load_dataset_builder(kind, data_files=urls, **file_formats.reader_options(kind, names, header))


def _kind(url: str) -> str:
    kind = file_formats.kind_of(PurePosixPath(url.partition("?")[0]).name)
    if kind is None:
        raise DataError(
            f"datasets.path: the format of {url} is not known. Set ds_type to one of {', '.join(file_formats.KINDS)}."
        )
    return kind


def take_split(parts: dict[str, Dataset], spec: str, source: str) -> Dataset:
    """The rows that `spec` selects from the named splits in `parts`.

    Slices work as in the datasets library: percentages are rounded to the nearest row, bounds past the end are clipped.
    Raises ValueError or AssertionError for an unknown split or a malformed slice, and DataError for one without rows.
    """
    sizes = {name: len(part) for name, part in parts.items()}
    with doing(f"taking the split {spec!r} of {source}, which has {', '.join(sizes)}"):
        spans = datasets.ReadInstruction.from_spec(spec).to_absolute(sizes)
    # A slice from past the end is not clipped by the datasets library.
    ranges = [(span.splitname, range(*slice(span.from_, span.to).indices(sizes[span.splitname]))) for span in spans]
    chosen = [parts[name].select(rows) for name, rows in ranges if len(rows)]
    if len(chosen) < len(ranges):
        held = ", ".join(f"{name} has {size} rows" for name, size in sizes.items())
        raise DataError(f"{source}: split {spec!r}, or a part of it, selects no rows ({held}). Widen the slice.")
    return datasets.concatenate_datasets(chosen) if len(chosen) > 1 else chosen[0]


def source_fingerprint(entry: Any) -> dict[str, Any]:
    """The contents of the files of a dataset entry, the commit of a dataset of the Hub, or the versions of URLs.

    Raises DataError if the source does not exist.
    """
    if is_url(entry.path):
        # The name of a reader's folder contains a hash of the URLs and of the version of each file (ETag or time).
        readers = [(urls, Path(_builder(urls, entry).cache_dir)) for urls in _files(entry).values()]
        return {"remote": [[*urls, "/".join(folder.parts[-3:])] for urls, folder in readers]}
    files = source_files(entry)
    if files is not None:
        folder = Path(os.path.expanduser(entry.path))
        cards = [(path.name, path) for path in card_of(folder)] if folder.is_dir() and is_repository(folder) else []
        return {"files": [[name, file_fingerprint(path)] for name, path in [*files, *cards]]}
    try:
        folder = snapshot_download(entry.path, repo_type="dataset", revision=entry.revision, allow_patterns=[])
    except Exception:  # not in the cache of files, but possibly in the cache of loaded datasets
        return {"hub": read_source(entry)._fingerprint}
    return {"hub": Path(folder).name}


def content_digest(entry: Any) -> str | None:
    """A hash of the files of a dataset entry; None for the Hub and URLs, for many bytes, or if unreadable."""
    try:
        files = source_files(entry)
        if files is None or sum(path.stat().st_size for _, path in files) > LARGEST_HASHED:
            return None
        found = [file_fingerprint(path) for _, path in files]
    except Exception:  # reported when it is read
        return None
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()
