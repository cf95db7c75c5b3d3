"""Rows that are read from `dataset_prepared_path`, or prepared and stored there, in a folder named by their key.

The key is a hash of everything that determines the rows: settings, data, transforms, tokenizer, code.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from datasets import disable_progress_bars, enable_progress_bars, load_from_disk
from datasets.utils import are_progress_bars_disabled
from transformers import PreTrainedTokenizerBase

from ebft.config import axolotl, section, user_functions
from ebft.config.keys.data import StreamKeys
from ebft.config.keys.models import AdapterKeys, AttentionKeys, ModelKeys
from ebft.config.keys.run import CheckpointKeys, HardwareKeys, HubKeys, LengthKeys, OptimizerKeys, ReportingKeys
from ebft.data import load, row_counts, tables
from ebft.data.sources import source_fingerprint
from ebft.data.transforms import built_in, own_transform
from ebft.errors import DataError, doing
from ebft.files import file_hash, json_hash, locked, new_folder, text_hash
from ebft.machine import is_main_process
from ebft.methods.base_config import EvaluationKeys, RayKeys
from ebft.printed import say, without_secrets
from ebft.run.config.schema import RunConfig


class Prepared(NamedTuple):
    """The rows of a run, the folder in which they are stored, and whether they were prepared now."""

    rows: load.LoadedRows
    folder: Path
    is_new: bool


def prepare_rows(config: RunConfig, tokenizer: PreTrainedTokenizerBase, base: Path) -> Prepared:
    """The rows of a run, read from a folder in `base`, or prepared there by one process. Raises DataError."""
    inputs = row_inputs(config, tokenizer)
    folder = base.expanduser() / json_hash(inputs)[:32]
    if (rows := read_rows(folder)) is not None:
        return Prepared(rows, folder, is_new=False)
    line = f"Waiting for another process that prepares the rows in {folder}"
    waiting = lambda: say(line, err=True) if is_main_process() else None
    with locked(folder, "dataset_prepared_path", waiting):
        if (rows := read_rows(folder)) is not None:
            return Prepared(rows, folder, is_new=False)
        rows = config.method.load_rows(config, tokenizer)
        if source_hashes(config) != inputs["data"]:
            raise DataError("A file of datasets or test_datasets was changed while it was read. Run the command again.")
        write_rows(folder, rows, without_secrets(inputs))
        for part in (rows.train, rows.evaluation):
            if part is not None:
                tables.discard_tables(part)
        return Prepared(read_rows(folder), folder, is_new=True)


def describe(prepared: Prepared) -> str:
    """One line with the folder and the numbers of rows."""
    rows, did = prepared.rows, "Stored" if prepared.is_new else "Using"
    evaluation = "" if rows.evaluation is None else f", {len(rows.evaluation):,} for evaluation"
    return f"{did} prepared rows in {prepared.folder}: {len(rows.train):,} for training{evaluation}"


RECORD = "prepared.json"
_PARTS = {"train": "train", "evaluation": "eval"}  # fields of LoadedRows, and their folders


def read_rows(folder: Path) -> load.LoadedRows | None:
    """The rows in `folder`, or None if it does not exist."""
    if not folder.exists():
        return None
    with doing(f"reading prepared rows in {folder} (if it is deleted, they are prepared again)"):
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        parts = {
            field: None if record["rows"][name] is None else load_from_disk(str(folder / name))
            for field, name in _PARTS.items()
        }
        return load.LoadedRows(**parts, reports=[row_counts.SectionReport(**report) for report in record["reports"]])


def write_rows(folder: Path, rows: load.LoadedRows, inputs: dict[str, Any]) -> None:
    """Write `rows`, made from `inputs`, to `folder`, whose lock is held; it is complete, or does not exist."""
    were_on = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        with doing("storing prepared rows (dataset_prepared_path)"), new_folder(folder) as partial:
            parts = {name: getattr(rows, field) for field, name in _PARTS.items()}
            for name, part in parts.items():
                if part is not None:
                    part.save_to_disk(str(partial / name))
            counts = {name: None if part is None else len(part) for name, part in parts.items()}
            reports = [asdict(report) for report in rows.reports]
            record = {"key": folder.name, "rows": counts, "reports": reports, "inputs": inputs}
            (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    finally:
        if were_on:
            enable_progress_bars()


# Entries of tokenizer_config.json about the place that the tokenizer was loaded from.
_PLACE = ("is_local", "local_files_only", "name_or_path")
_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = ("ebft", "datasets", "transformers", "tokenizers", "jinja2")
# Groups of keys that no row depends on, apart from `_OF_ROWS`: the files of the tokenizer are compared, and rows of a
# stream are not stored.
_IDLE_GROUPS = (
    *(AdapterKeys, AttentionKeys, axolotl.CarriedOverKeys, CheckpointKeys, EvaluationKeys, HardwareKeys, HubKeys),
    *(LengthKeys, ModelKeys, OptimizerKeys, RayKeys, ReportingKeys, StreamKeys),
)
_OF_ROWS = {"chat_template_kwargs", "seed", "data_seed"}
IDLE = {"dataset_prepared_path", "dataset_num_proc", "vllm"}
IDLE |= {key for group in _IDLE_GROUPS for key in group.model_fields} - _OF_ROWS


def row_inputs(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What determines the rows of a run, as JSON. Raises DataError if a source or a transform does not exist."""
    names = {entry.type for entry in (*config.datasets, *config.test_datasets)}
    own = {name: own_transform(name) for name in names if built_in(name) is None}
    modules = {(name.rpartition(".")[0], function.__module__) for name, function in own.items()}
    sources = user_functions.module_sources(chain(*modules))  # installed packages are left out
    paths = sorted(path for path in _PACKAGE.rglob("*") if path.suffix in (".py", ".jinja"))
    package = json_hash([[path.relative_to(_PACKAGE).as_posix(), file_hash(path)] for path in paths])
    inputs = {
        "settings": row_settings(config, sources.values()),
        "data": source_hashes(config),
        "transforms": {name: text_hash(source) for name, source in sorted(sources.items())},
        "tokenizer": saved_tokenizer_hashes(tokenizer),
        "code": {"package": package, **{name: version(name) for name in _LIBRARIES}},
    }
    return json.loads(json.dumps(inputs, default=str))


def source_hashes(config: RunConfig) -> list[dict[str, Any]]:
    """The hashes of each source of `datasets` and `test_datasets`."""
    return [source_fingerprint(entry) for entry in (*config.datasets, *config.test_datasets)]


def row_settings(config: RunConfig, sources: Iterable[str] = ()) -> dict[str, Any]:
    """The settings that may determine the rows, by dotted key: all but `IDLE`.

    `sources` are the texts of custom transforms, which may read any key of the config: keys whose names occur in one of
    them are included, and so is the number of processes for batches, which end where processes do.
    """
    words = {word for source in sources for word in re.findall(r"\w+", source)}
    words |= {"dataset_num_proc"} if "batched" in words else set()
    is_read = lambda key: key.partition(".")[0] not in IDLE or key.rpartition(".")[2] in words
    return {key: value for key, value in section.flat_settings(config) if is_read(key)}


def saved_tokenizer_hashes(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """The hash of each file that saves the tokenizer, and of the source of its class."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        found = {path.relative_to(folder).as_posix(): file_hash(path) for path in paths}
        settings = Path(folder) / "tokenizer_config.json"
        if settings.is_file():
            values = json.loads(settings.read_text(encoding="utf-8"))
            found[settings.name] = json_hash({key: value for key, value in values.items() if key not in _PLACE})
    source = inspect.getsourcefile(type(tokenizer))
    found["class"] = type(tokenizer).__name__ if source is None else file_hash(Path(source))
    return found
