"""Download of a wheel with a given version and checksum, with pip, so that the user's index settings apply."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ebft.catalog import cache_dir, locked
from ebft.errors import FetchError
from ebft.printed import say

RETRIES = 2
_BROKEN_CONNECTION = re.compile(r"^WARNING: Retrying .*(?:>: |\(['\"])([^'\"]+)")


def fetch_wheel(name: str, version: str, sha256: str, cache: Path | None = None) -> Path:
    """The wheel file of `name` at `version`, downloaded to the cache if it is not there yet.

    `sha256` is the checksum of the file in hexadecimal digits; a file with a different checksum is never returned.
    `cache` defaults to `cache_dir()`. Raises FetchError if pip cannot download the wheel or the checksum differs.
    """
    found = _cached(_folder(name, version, cache), sha256)
    if found is not None:
        return found
    with wheel_in_use(name, version, sha256, cache) as wheel:
        return wheel


@contextmanager
def wheel_in_use(name: str, version: str, sha256: str, cache: Path | None = None) -> Iterator[Path]:
    """The result of `fetch_wheel`, which no other process fetches or removes in this context."""
    folder = _folder(name, version, cache)
    with locked(folder):
        yield _cached(folder, sha256) or _fetch_into(folder, name, version, sha256)


def remove_wheel(name: str, version: str) -> None:
    """Remove a wheel from the cache, unless another process has done so."""
    folder = _folder(name, version, None)
    with locked(folder):
        shutil.rmtree(folder, ignore_errors=True)


def check_wheel(wheel: Path, name: str, version: str, sha256: str) -> None:
    """Raise FetchError unless `wheel` is a file with this checksum."""
    if not wheel.is_file():
        raise FetchError(f"File not found: {wheel}. Give the wheel file of {name} {version}.")
    given = sha256_of(wheel)
    if given != sha256:
        raise FetchError(
            f"{wheel.name} is not the expected wheel of {name} {version}: its sha256 is {given}, expected "
            f"{sha256}. Download it again, or from another package index (PIP_INDEX_URL)."
        )


def sha256_of(path: Path) -> str:
    """The sha256 checksum of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _folder(name: str, version: str, cache: Path | None) -> Path:
    return (cache_dir() if cache is None else Path(cache)) / "wheels" / f"{name}-{version}"


def _cached(folder: Path, sha256: str) -> Path | None:
    return next((wheel for wheel in folder.glob("*.whl") if sha256_of(wheel) == sha256), None)


def _fetch_into(folder: Path, name: str, version: str, sha256: str) -> Path:
    """Download to a folder next to `folder`, check, and rename it, so that no partial download is left in it."""
    partial = folder.with_name(f".{folder.name}.partial")
    for leftover in (partial, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        wheel = _download(partial, name, version)
        check_wheel(wheel, name, version, sha256)
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder / wheel.name


def _download(folder: Path, name: str, version: str) -> Path:
    say(f"Downloading {name} {version}", err=True)
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    what = ["--retries", str(RETRIES), "--no-deps", "--only-binary=:all:", "--dest", str(folder), f"{name}=={version}"]
    done = subprocess.run([*pip, *what], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = _reason(done.stdout)
        remedy = (
            "Free disk space, or set EBFT_CACHE, and TMPDIR for pip, to folders on another disk."
            if "No space left on device" in reason
            else "Connect to a package index, or set PIP_INDEX_URL to one that provides it."
        )
        raise FetchError(
            f"Cannot download {name} {version}: `python -m pip download --no-deps {name}=={version}` failed.\n"
            f"{reason}\n{remedy}"
        )
    return wheels[0]


def _reason(output: str) -> str:
    """The lines of pip's output with the indexes and the error, or its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if "ERROR: Exception:" in lines:  # followed by a traceback
        return lines[-1]
    indexes = [line for line in lines if line.startswith("Looking in indexes:")]
    told = [line for line in lines if line.startswith("ERROR") or "No module named pip" in line]
    broken = [match[1] for line in lines if (match := _BROKEN_CONNECTION.search(line))]
    return "\n".join([*indexes, *broken[-1:], *(told or lines[-1:] or ["pip printed no output."])])
