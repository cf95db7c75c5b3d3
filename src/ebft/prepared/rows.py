"""The rows of a run: read from `dataset_prepared_path`, or prepared, and stored there if it is set."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset, disable_progress_bars, enable_progress_bars, load_from_disk
from datasets.utils import are_progress_bars_disabled
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from ebft.config.schema import RunConfig
from ebft.data.load import LoadedRows
from ebft.data.row_counts import SectionReport
from ebft.data.tables import discard
from ebft.errors import DataError
from ebft.files import file_hash
from ebft.prepared.key import data_fingerprints, key_of, row_inputs
from ebft.printed import say


class Prepared(NamedTuple):
    """The rows of a run, the folder in which they are stored, and whether they were prepared now."""

    rows: LoadedRows
    folder: Path
    is_new: bool


def run_rows(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> LoadedRows:
    """The rows that a run trains on and is evaluated on, with a line about the folder they are read from, if any."""
    if config.dataset_prepared_path is None or config.streaming:
        return config.method.load_rows(config, tokenizer)
    prepared = prepare_rows(config, tokenizer, Path(config.dataset_prepared_path))
    _say(describe(prepared))
    return prepared.rows


def prepare_rows(config: RunConfig, tokenizer: PreTrainedTokenizerBase, base: Path) -> Prepared:
    """The rows of a run, read from a folder in `base`, or prepared and stored in it if there are none that fit.

    Of several processes, one prepares the rows while the others wait. Damaged rows are prepared again, with a line.
    Raises DataError if the rows cannot be loaded, or not be written.
    """
    inputs = row_inputs(config, tokenizer)
    folder = base.expanduser() / key_of(inputs)
    try:
        rows = read_rows(folder)
    except DamagedRows:  # perhaps another process replaces them; reported below if not
        rows = None
    if rows is not None:
        return Prepared(rows, folder, is_new=False)
    waiting = lambda: _say(f"Waiting for another process that prepares the rows in {folder}")
    with locked(folder, waiting):
        try:
            rows = read_rows(folder)
        except DamagedRows as damage:
            _say(f"Prepared rows in {folder} are damaged ({damage}); they are prepared again", of_any_rank=True)
        if rows is not None:
            return Prepared(rows, folder, is_new=False)
        changed = closest_difference(folder.parent, inputs)
        if changed:
            _say(f"Preparing new rows: the most similar ones in {folder.parent} differ in {', '.join(changed)}")
        rows = config.method.load_rows(config, tokenizer)
        if data_fingerprints(config) != inputs["data"]:
            raise DataError("A file of datasets or test_datasets was changed while it was read. Run the command again.")
        write_rows(folder, rows, inputs)
        for part in (rows.train, rows.evaluation):
            if part is not None:
                discard(part)
        return Prepared(read_rows(folder), folder, is_new=True)


def describe(prepared: Prepared) -> str:
    """One line with the folder and the numbers of rows."""
    rows, did = prepared.rows, "Stored" if prepared.is_new else "Using"
    evaluation = "" if rows.evaluation is None else f", {len(rows.evaluation):,} for evaluation"
    return f"{did} prepared rows in {prepared.folder}: {len(rows.train):,} for training{evaluation}"


def _say(line: str, of_any_rank: bool = False) -> None:
    if of_any_rank or os.environ.get("RANK", "0") == "0":
        say(line, err=True)


def closest_difference(base: Path, inputs: dict[str, Any]) -> list[str]:
    """The names of what differs between `inputs` and the stored rows in `base` with the fewest differences.

    Empty if there are no stored rows.
    """
    found = [differences(stored, inputs) for stored in _stored_inputs(base)]
    return min(found, key=lambda names: (len(names), names), default=[])


def differences(stored: dict[str, Any], inputs: dict[str, Any]) -> list[str]:
    """The settings that differ, and which of data, transforms, tokenizer and code do."""
    before, now = stored.get("settings", {}), inputs["settings"]
    settings = [key for key in {**now, **before} if (key in before, before.get(key)) != (key in now, now.get(key))]
    return settings + [name for name in inputs if name != "settings" and stored.get(name) != inputs[name]]


def _stored_inputs(base: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(base.glob(f"[!.]*/{RECORD}")):
        try:
            inputs = json.loads(path.read_text(encoding="utf-8"))["inputs"]
        except (OSError, ValueError, TypeError, KeyError):  # damaged rows explain nothing
            continue
        if isinstance(inputs, dict):
            yield inputs


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
