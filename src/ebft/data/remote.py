"""Files at URLs (`s3://`, `gs://`, `https://`, ...), read with the datasets library."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from datasets import Dataset, DatasetBuilder, load_dataset_builder

from ebft.data.files import KINDS
from ebft.data.json_files import read_json
from ebft.data.splits import DEFAULT_SPLIT, take_split
from ebft.errors import DataError, cause

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
