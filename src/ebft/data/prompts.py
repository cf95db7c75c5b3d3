"""Loading prompts with their references from the `datasets:` section, for structured mode and `rl: grpo`."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features
from transformers import PreTrainedTokenizerBase

from ebft.data.apply import apply_transform, named
from ebft.data.keys import DataSettings
from ebft.data.lengths import DROPPED
from ebft.data.load import LoadedRows, LoadEntry, load_sections
from ebft.data.prompt_rows import FEATURES, PromptRow
from ebft.data.report import RowCounts
from ebft.errors import DataError

_BATCH = 1000  # rows unpacked at once


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
        rows = apply_transform(raw, entry, config, tokenizer, check, FEATURES, first_document)
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
    return rows.map(
        _unpack,
        batched=True,
        batch_size=_BATCH,
        fn_kwargs={"columns": columns},
        remove_columns=rows.column_names,
        features=_types(rows, columns),
        load_from_cache_file=False,
        desc="Reading prompts",
    )


def _unpack(batch: dict[str, list], columns: list[str]) -> dict[str, list]:
    rows = [json.loads(row) for row in batch["row"]]
    absent = {"remaining_turns": []}
    return {name: [row.get(name, absent.get(name)) for row in rows] for name in columns}


def _types(rows: Dataset, columns: list[str]) -> Features:
    """The type of each column over all rows: the first rows may lack some keys of a message, or contain only None."""
    types = {name: pa.null() for name in columns}
    for batch in rows.iter(batch_size=_BATCH):
        for name, values in _unpack(batch, columns).items():
            try:
                found = [pa.schema([(name, kind)]) for kind in (types[name], pa.array(values).type)]
                types[name] = pa.unify_schemas(found, promote_options="permissive").field(name).type
            except pa.ArrowException as error:
                raise DataError(
                    f"column {name!r} contains values of different types ({error}). Convert it to one type in all rows "
                    "(for example text), or remove it with the transform's remove_columns."
                ) from error
    if pa.types.is_null(types["ground_truth"]):
        types["ground_truth"] = pa.string()
    return Features.from_arrow_schema(pa.schema(list(types.items())))
