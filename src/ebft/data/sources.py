"""The raw rows of a `datasets:` entry: from the Hub, from local files and folders, or from `save_to_disk`."""

import os
import warnings
from glob import glob
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from ebft.data.files import KINDS, files_below, read_files, read_folder
from ebft.data.locate import locate
from ebft.data.remote import is_url, read_remote
from ebft.data.splits import DEFAULT_SPLIT, take_split
from ebft.data.text_file import read_text
from ebft.data.transform_names import reads_lines
from ebft.errors import DataError, cause, shortened


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
