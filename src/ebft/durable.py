"""Folders that are written completely or not at all, also if the process is killed or the machine loses power.

A folder is written below `STAGING` of its parent, flushed to the disk, and then renamed.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

STAGING = "_saving"  # incomplete and replaced folders in an output folder; deleted by the next save

CHECKSUMS = "ebft_checksums.json"  # in a checkpoint: {path of a binary file: CRC-32 of its contents}
RUN_FILE = "ebft_run.json"  # in a checkpoint or a final model: the settings and inputs of its run
STATE = "trainer_state.json"  # of a checkpoint or a final model, as transformers writes it
_TEXTS = (".json", ".jinja", ".md", ".txt")  # may be edited


def clean_staging(parent: Path) -> None:
    """Delete what earlier saves left behind in `parent`."""
    shutil.rmtree(parent / STAGING, ignore_errors=True)


def remove_staged(staged: Path) -> None:
    """Delete a folder in a staging folder, or this itself, which remains only if it has what other saves left."""
    shutil.rmtree(staged, ignore_errors=True)
    if staged.parent.name == STAGING:
        with suppress(OSError):
            staged.parent.rmdir()


def check_writable(folder: Path) -> None:
    """Raise OSError if the files of an existing folder cannot be listed or created, tested by creating one."""
    os.listdir(folder)
    path = folder / f".ebft-{os.getpid()}"
    path.write_bytes(b"?")  # a full disk may have room for an empty file
    path.unlink()


def publish(staged: Path, folder: Path) -> None:
    """Move the complete folder `staged` to `folder`, replacing an existing one. Both must be on one file system."""
    allow_readers(staged)
    flush(staged)
    parked = _park(folder) if folder.exists() else None
    os.replace(staged, folder)
    _flush_one(folder.parent)
    if parked is not None:
        shutil.rmtree(parked, ignore_errors=True)


def discard(folder: Path) -> None:
    """Delete a folder such that no part of it remains under its name if the deletion is interrupted."""
    shutil.rmtree(_park(folder), ignore_errors=True)


def _park(folder: Path) -> Path:
    """Move a folder to the staging folder, and return its new path."""
    parked = folder.parent / STAGING / f"{folder.name}.old"
    shutil.rmtree(parked, ignore_errors=True)
    parked.parent.mkdir(exist_ok=True)
    os.replace(folder, parked)
    return parked


def publish_files(staged: Path, folder: Path, obsolete: Iterable[Path] = ()) -> None:
    """Move the files of `staged` into the existing `folder` one by one, replacing files of the same name.

    The files `obsolete` of `folder` that `staged` does not replace are deleted first, so that they are never read
    together with the new ones.
    """
    allow_readers(staged)
    flush(staged)
    for path in obsolete:
        if not (staged / path.relative_to(folder)).is_file():
            path.unlink(missing_ok=True)
    for path in _files(staged):
        target = folder / path.relative_to(staged)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)
    _flush_one(folder)


def write_text(path: Path, text: str) -> None:
    """Write a file that is either complete or not there."""
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_text(text, encoding="utf-8")
    _flush_one(draft)
    os.replace(draft, path)
    _flush_one(path.parent)


def write_checksums(folder: Path) -> None:
    """Write the checksums of the files below `folder` that are not text into its file CHECKSUMS."""
    found = {
        path.relative_to(folder).as_posix(): checksum(path) for path in _files(folder) if path.suffix not in _TEXTS
    }
    write_text(folder / CHECKSUMS, json.dumps(found, indent=2) + "\n")


def checksum(path: Path) -> int:
    """The CRC-32 of a file. Raises OSError."""
    value = 0
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            value = zlib.crc32(part, value)
    return value


def allow_readers(folder: Path) -> None:
    """Give safetensors files below the new `folder` the permissions that the umask gives to other new files.

    safetensors 0.8 creates them for their owner only, so that no other user, such as that of a server, can read them.
    """
    mode = folder.stat().st_mode & 0o666  # the umask itself cannot be read without changing it for all threads
    for path in folder.rglob("*.safetensors"):
        with suppress(OSError):  # some network file systems have no permissions of single files
            path.chmod(path.stat().st_mode | mode)


def flush(folder: Path) -> None:
    """Flush all files and folders below `folder` to the disk; without effect on Windows."""
    for path in _files(folder):
        _flush_one(path)
    for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        _flush_one(path)


def _files(folder: Path) -> Iterable[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _flush_one(path: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
