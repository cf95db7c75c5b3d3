"""Folders of prepared rows: complete or absent, since they are renamed into place after they are written.

A folder is named after its key and contains the rows as `Dataset.save_to_disk` writes them, and `prepared.json`: what
the rows were made from, the reports of loading, and the hash of every file.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datasets import Dataset, disable_progress_bars, enable_progress_bars, load_from_disk
from datasets.utils import are_progress_bars_disabled
from filelock import FileLock

from ebft.data.lengths import SectionReport
from ebft.data.load import LoadedRows
from ebft.errors import DataError
from ebft.files import file_hash

RECORD = "prepared.json"
_PARTS = {"train": "train", "evaluation": "eval"}  # fields of LoadedRows, and their folders


class DamagedRows(Exception):
    """A folder of prepared rows is incomplete or was changed; the message is the reason."""


def read_rows(folder: Path) -> LoadedRows | None:
    """The rows in `folder`, or None if it does not exist. Raises DamagedRows."""
    if not folder.exists():
        return None
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        if record["key"] != folder.name:
            raise DamagedRows(f"{RECORD} has the key {record['key']}")
        _check_files(folder, record["files"])
        parts = {field: _read_part(folder / name, record["rows"][name]) for field, name in _PARTS.items()}
        return LoadedRows(**parts, reports=[SectionReport(**report) for report in record["reports"]])
    except DamagedRows:
        raise
    except Exception as error:  # JSON and Arrow readers raise many types of errors
        raise DamagedRows(f"{type(error).__name__}: {error}") from error


def _check_files(folder: Path, files: dict[str, str]) -> None:
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedRows(f"{name} is missing")
        if file_hash(path) != expected:
            raise DamagedRows(f"{name} was changed")


def _read_part(folder: Path, rows: int | None) -> Dataset | None:
    if rows is None:
        return None
    part = load_from_disk(str(folder))
    if len(part) != rows:
        raise DamagedRows(f"{folder.name} has {len(part)} rows instead of {rows}")
    return part


def write_rows(folder: Path, rows: LoadedRows, inputs: dict[str, Any]) -> None:
    """Write `rows`, made from `inputs`, to `folder`, replacing it. To be called while holding the lock of `folder`.

    Raises DataError if writing fails; then, or if the process is killed, `folder` does not exist.
    """
    for left in folder.parent.glob(f".{folder.name}.*.partial"):  # of killed processes
        shutil.rmtree(left, ignore_errors=True)
    partial = folder.parent / f".{folder.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.partial"
    try:
        partial.mkdir(parents=True)
        parts = {name: getattr(rows, field) for field, name in _PARTS.items()}
        with _without_progress():
            for name, part in parts.items():
                if part is not None:
                    part.save_to_disk(str(partial / name))
        written = sorted(path for path in partial.rglob("*") if path.is_file())
        record = {
            "key": folder.name,
            "rows": {name: None if part is None else len(part) for name, part in parts.items()},
            "files": {path.relative_to(partial).as_posix(): file_hash(path) for path in written},
            "reports": [asdict(report) for report in rows.reports],
            "inputs": inputs,
        }
        (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except OSError as error:
        raise DataError(
            f"Prepared rows cannot be written to {folder} ({error.strerror or error}). Set dataset_prepared_path to "
            "another folder."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def locked(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of `folder`, a file next to it; `waiting` is called if another process holds it.

    Raises DataError if the parent folder cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / f".{folder.name}.lock")
        try:
            lock.acquire(timeout=0)
        except TimeoutError:
            waiting()
            lock.acquire()
    except OSError as error:
        raise DataError(
            f"dataset_prepared_path: cannot write to {folder.parent} ({error.strerror or error}). Choose another "
            "folder, or leave it unset to prepare rows in every run."
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _without_progress() -> Iterator[None]:
    were_on = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if were_on:
            enable_progress_bars()
