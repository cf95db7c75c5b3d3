"""Files at URLs (`s3://`, `gs://`, `https://`, ...), read with the datasets library and fsspec."""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from datasets import Dataset, load_dataset
from fsspec.core import url_to_fs

from ebft.data.files import KINDS
from ebft.data.splits import DEFAULT_SPLIT, take_split
from ebft.errors import DataError, cause

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")
_KEYS = "Check the URL, and the credentials in the environment."


def is_url(path: str) -> bool:
    """Whether a path is a URL, such as `s3://bucket/rows.jsonl`."""
    return _URL.match(path) is not None


def read_remote(entry: Any) -> Dataset:
    """The rows of the files at the URL `path`, or of `data_files` below it.

    Raises DataError that names the URL, and the package to install if its kind of storage needs one.
    """
    named = entry.data_files if isinstance(entry.data_files, dict) else {DEFAULT_SPLIT: entry.data_files}
    parts = {split: _read(list(_urls(entry.path, given)), entry) for split, given in named.items()}
    return take_split(parts, entry.split, entry.path)


def remote_fingerprint(entry: Any) -> list[list[str]]:
    """The URL of each file with what its storage says about its version: a checksum, or size and time of change."""
    patterns = list(entry.data_files.values()) if isinstance(entry.data_files, dict) else [entry.data_files]
    urls = [url for given in patterns for url in _urls(entry.path, given)]
    found = []
    for url in urls:
        filesystem, path = _storage(url)
        try:
            paths = filesystem.glob(path) if "*" in path else [path]
            found += [[name, filesystem.ukey(name)] for name in paths]
        except Exception as error:  # of the package of the storage
            raise DataError(f"datasets.path: {url} cannot be read ({cause(error)}). {_KEYS}") from error
    return found


def _urls(path: str, patterns: Any) -> Iterator[str]:
    if patterns is None:
        yield path
        return
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        yield pattern if is_url(pattern) else f"{path.rstrip('/')}/{pattern}"


def _read(urls: list[str], entry: Any) -> Dataset:
    for url in urls:
        _storage(url)
    kind = entry.ds_type or _kind(urls[0])
    options = {"sample_by": "document"} if kind == "text" else {}
    try:
        return load_dataset(kind, data_files=urls, split="train", **options)
    except Exception as error:  # of the package of the storage, or of the parser
        raise DataError(
            f"datasets.path: {', '.join(urls)} cannot be read as {kind} ({cause(error)}). {_KEYS}"
        ) from error


def _storage(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it."""
    try:
        return url_to_fs(url)
    except ImportError as error:  # its message says which package to install
        raise DataError(f"datasets.path: {url} needs another package: {cause(error)}.") from error
    except ValueError as error:
        raise DataError(
            f"datasets.path: {url} is not a kind of URL that can be read ({cause(error)}). Use a local path, s3://, "
            "gs:// or https://."
        ) from error


def _kind(url: str) -> str:
    suffix = PurePosixPath(url.partition("?")[0]).suffix.lower()
    for kind, suffixes in KINDS.items():
        if suffix in suffixes:
            return kind
    raise DataError(f"datasets.path: the format of {url} is not clear. Set ds_type to one of {', '.join(KINDS)}.")
