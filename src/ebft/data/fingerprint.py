"""Fingerprints of data sources: equal if their contents are equal."""

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from ebft.data.file_hash import file_fingerprint
from ebft.data.sources import read_source, source_files


def source_fingerprint(entry: Any) -> dict[str, Any]:
    """The contents of the files of a dataset entry, or the commit of a dataset of the Hub.

    Raises DataError if the source does not exist.
    """
    files = source_files(entry)
    if files is None:
        return {"hub": hub_commit(entry)}
    return {"files": [[name, file_fingerprint(path)] for name, path in files]}


def hub_commit(entry: Any) -> str:
    """The commit of the entry's revision, of the Hub or of its local cache."""
    try:
        folder = snapshot_download(entry.path, repo_type="dataset", revision=entry.revision, allow_patterns=[])
    except Exception:  # not in the cache of files, but possibly in that of loaded datasets; else this raises DataError
        return read_source(entry)._fingerprint
    return Path(folder).name
