"""Fingerprints of data sources: equal if their contents are equal."""

import hashlib
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from ebft.data.sources import read_source, source_files
from ebft.errors import DataError

LARGEST_HASHED = 2**30  # bytes; reading larger files at the start of every run takes too long


def source_fingerprint(entry: Any) -> dict[str, Any]:
    """The contents of the files of a dataset entry, or the commit of a dataset of the Hub.

    Raises DataError if the source does not exist.
    """
    files = source_files(entry)
    if files is None:
        return {"hub": hub_commit(entry)}
    return {"files": [[name, file_fingerprint(path)] for name, path in files]}


def file_fingerprint(path: Path) -> str:
    """The hash of a file's content; of a file above `LARGEST_HASHED` bytes, its path, size and modification time."""
    try:
        stat = path.stat()
        if stat.st_size > LARGEST_HASHED:
            return f"{path.resolve()}, {stat.st_size} bytes, modified {stat.st_mtime_ns}"
        return file_hash(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from error


def file_hash(path: Path) -> str:
    """The SHA-256 hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hub_commit(entry: Any) -> str:
    """The commit of the entry's revision, of the Hub or of its local cache."""
    try:
        folder = snapshot_download(entry.path, repo_type="dataset", revision=entry.revision, allow_patterns=[])
    except Exception:  # not in the cache of files, but possibly in that of loaded datasets; else this raises DataError
        return read_source(entry)._fingerprint
    return Path(folder).name
