"""Loading prompts with their references from the `datasets:` section, for structured mode and `rl: grpo`."""

import json
from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset, Features
from transformers import PreTrainedTokenizerBase

from ebft.data.apply import apply_transform, named
from ebft.data.json_values import Types, stored
from ebft.data.keys import DataSettings
from ebft.data.lengths import DROPPED
from ebft.data.load import LoadedRows, LoadEntry, load_sections
from ebft.data.processes import map_rows
from ebft.data.prompt_rows import FEATURES, PromptRow
from ebft.data.report import RowCounts
from ebft.errors import DataError

_BATCH = 1000  # rows unpacked at once
_ABSENT: dict[str, list] = {"remaining_turns": []}  # values of rows without a field, where they are not None


def load_prompts(config: DataSettings, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, Dataset | None]:
    """The training rows and the evaluation rows of `load_prompt_rows`."""
    rows = load_prompt_rows(config, tokenizer)
    return rows.train, rows.evaluation


def load_prompt_rows(config: DataSettings, tokenizer: PreTrainedTokenizerBase) -> LoadedRows:
    """The training rows and the evaluation rows (None if the config holds no data out).

    Columns: `prompt` (text in all rows, or messages in all rows), `ground_truth` (text; None if `rl: grpo` has none),
    `remaining_turns` if a transform returns it (messages; an empty list in other rows), `tools`, `reply` and
    `chat_template_kwargs` if a row has them (JSON text), and all other columns that the transforms keep, for reward
    functions. References are not truncated: rows that are too long are dropped, with a
    count for each reason. `val_set_size` holds out whole documents, so the turns of one chat stay together. Raises
    DataError if a source cannot be read, sources are incompatible, or no usable rows are left.
    """
    train, evaluation, reports = load_sections(config, prompt_rows(config, tokenizer), hint(config))
    columns = _columns(train, evaluation)
    evaluation = None if evaluation is None else _unpacked(evaluation, columns)
    return LoadedRows(_unpacked(train, columns), evaluation, reports)


def prompt_rows(config: DataSettings, tokenizer: PreTrainedTokenizerBase) -> LoadEntry:
    """Return a function that loads packed rows of prompts from a source; all sources must have the same kind."""
    sources: dict[str, str] = {}  # the first source of each kind of prompt

    def load_entry(entry: Any, raw: Dataset, first_document: int, counts: RowCounts) -> Dataset:
        check = PromptRow(config, tokenizer, entry.chat_template_kwargs)
        rows = apply_transform(raw, entry, config, tokenizer, check, FEATURES, first_document, counts)
        for kind in sorted(set(rows["kind"]) - {""}):
            sources.setdefault(kind, named(entry))
        _refuse_mixture(sources)
        reasons = np.asarray(rows["reason"])
        documents = np.asarray(rows["document"])
        for reason in DROPPED:
            counts[reason] += int((reasons == reason).sum())
            counts.note(reason, documents[reasons == reason].tolist())
        return rows.select(np.flatnonzero(reasons == ""))

    return load_entry


def unpack_rows(rows: Dataset) -> Dataset:
    """Unpack rows to one column for each field that any of them has."""
    return _unpacked(rows, _columns(rows))


def hint(config: DataSettings) -> str:
    if not config.required_rows.needs_reference:
        return f"provide rows with a prompt that is shorter than sequence_len: {config.sequence_len}, or increase it."
    return (
        "provide rows with a prompt and a reference that fit within sequence_len: "
        f"{config.sequence_len} together, including all turns of a conversation, or increase it."
    )


def _refuse_mixture(sources: dict[str, str]) -> None:
    if len(sources) < 2:
        return
    (kind, source), (other_kind, other) = list(sources.items())[:2]
    raise DataError(
        f"cannot mix different kinds of prompts: {source} returns {kind}, {other} returns "
        f"{other_kind}. Use text for all prompts, or messages whose content is text."
    )


def _columns(*datasets: Dataset | None) -> list[str]:
    """All columns of the rows, those with a special meaning first."""
    packed = [names for rows in datasets if rows is not None for names in rows.unique("columns")]
    found = dict.fromkeys(name for names in packed for name in json.loads(names))
    own = ["prompt", "ground_truth", *(["remaining_turns"] if "remaining_turns" in found else [])]
    return [*own, *(name for name in found if name not in own)]


def _unpacked(rows: Dataset, columns: list[str]) -> Dataset:
    """The rows with one column per field, with a type that can represent all of its values."""
    features = _features(rows, columns)
    return map_rows(
        rows,
        partial(_unpack, features=features),
        batched=True,
        batch_size=_BATCH,
        remove_columns=rows.column_names,
        features=features,
        desc="Reading prompts",
    )


def _unpack(batch: dict[str, list], features: Features) -> dict[str, list]:
    rows = [json.loads(row) for row in batch["row"]]
    return {name: stored([row.get(name, _ABSENT.get(name)) for row in rows], kind) for name, kind in features.items()}


def _features(rows: Dataset, columns: list[str]) -> Features:
    """The type of each column over all rows. Nested values stay those of their row: JSON, not mappings of Arrow."""
    types = Types(columns)
    for batch in rows.iter(batch_size=_BATCH):
        for row in map(json.loads, batch["row"]):
            types.add(row)
    for name, kinds in types.mixed():
        raise DataError(
            f"column {name!r} contains values of different types ({', '.join(kinds)}). Convert it to one type in all "
            "rows (for example text), or remove it with the transform's remove_columns."
        )
    return Features(types.features())
