"""Fingerprints of data sources: equal if their contents are equal."""

import hashlib
import json
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from ebft.data.file_hash import LARGEST_HASHED, file_fingerprint
from ebft.data.remote import is_url, remote_fingerprint
from ebft.data.sources import read_source, source_files
from ebft.errors import DataError


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
