"""The rows of a dataset entry as an IterableDataset, which reads its files as they are needed."""

from pathlib import Path
from typing import Any

from datasets import IterableDataset, load_dataset

from ebft.data.diagnose import explain
from ebft.data.files import exact_files, files_by_split, kinds_of, reader_options
from ebft.data.json_files import json_batches, json_rows
from ebft.data.remote import is_url, remote_builders
from ebft.data.sources import local_path, named_files, names_a_format, saved_parts, saved_to_disk, source_files
from ebft.errors import DataError, cause


def open_source(entry: Any) -> IterableDataset:
    """The rows of `path`, which may be what `read_source` reads.

    Raises DataError that names the missing path or split.
    """
    if is_url(entry.path):
        return _one(remote_builders(entry), entry).as_streaming_dataset(split="train")
    if names_a_format(entry):
        return _open_files(Path.cwd(), entry, kind=entry.ds_type or entry.path)
    path = local_path(entry)
    if path is None:
        return _open_hub(entry)
    if path.is_dir() and saved_to_disk(path):
        return _one(saved_parts(path), entry).to_iterable_dataset()
    return _open_files(path, entry, kind=entry.ds_type)


def problem(entry: Any, error: Exception) -> str | None:
    """What is wrong with the files of an entry in which an error occurred, with the line if there is one."""
    files = source_files(entry)
    if not files:
        return None
    path = Path(entry.path)
    if path.is_dir() and saved_to_disk(path):
        return None
    kinds = kinds_of([path for _, path in files], entry.ds_type, entry.path)
    return explain(kinds[0][1], [path for path, _ in kinds], error)


def _one(parts: dict[str, Any], entry: Any) -> Any:
    """The split of the entry."""
    if entry.split not in parts:
        raise DataError(f"{entry.path}: no split {entry.split!r}. Available splits: {', '.join(parts)}.")
    return parts[entry.split]


def _open_files(path: Path, entry: Any, kind: str | None) -> IterableDataset:
    if path.is_dir() and not entry.data_files:
        files = _one(files_by_split(path, kind, entry.path), entry)
    else:
        files = kinds_of(_one(named_files(path, entry), entry), kind, entry.path)
    found = sorted({kind for _, kind in files})
    if len(found) > 1:
        raise DataError(
            f"{entry.path}: a stream reads files of one format, but there are {', '.join(found)}. Use separate entries "
            "of datasets, or data_files."
        )
    paths = [path for path, _ in files]
    files, options = exact_files(found[0], paths), reader_options(found[0], paths)
    if found == ["json"]:
        for path in paths:
            next(json_rows(path))  # raises for a file that does not begin with a row
        return IterableDataset.from_generator(json_batches, gen_kwargs={"paths": [str(path) for path in paths]})
    try:
        return load_dataset(found[0], data_files=files, split="train", streaming=True, **options)
    except Exception as error:  # builders raise the errors of their parsers
        raise DataError(f"{entry.path}: cannot be read ({cause(error)}).") from error


def _open_hub(entry: Any) -> IterableDataset:
    options = {"data_files": entry.data_files, "revision": entry.revision}
    try:
        return load_dataset(entry.path, entry.name, split=entry.split, streaming=True, **options)
    except Exception as error:  # Hub, builder and parser errors have no common base class
        raise DataError(
            f"datasets.path: {entry.path!r} was interpreted as a Hub id and could not be opened: {cause(error)} "
            "(name, split, revision and data_files of the entry are passed to load_dataset unchanged)."
        ) from error
