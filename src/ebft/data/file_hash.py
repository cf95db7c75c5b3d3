"""Fingerprints of files: equal if their contents are equal."""

import hashlib
from pathlib import Path

from ebft.errors import DataError

LARGEST_HASHED = 2**30  # bytes; reading larger files at the start of every run takes too long


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
