"""The rows of a run: read from `dataset_prepared_path`, or prepared, and stored there if it is set."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ebft.config.schema import RunConfig
from ebft.data.load import LoadedRows
from ebft.data.tables import discard
from ebft.errors import DataError
from ebft.prepared.key import data_fingerprints, key_of, row_inputs
from ebft.prepared.store import RECORD, DamagedRows, locked, read_rows, write_rows
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
