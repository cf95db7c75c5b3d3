"""Loading rows of preference data from the `datasets:` section of a config."""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ebft.data.apply import apply_transform
from ebft.data.chat_markers import split_by_template, split_markers, warn_of_split_markers
from ebft.data.keys import DataSettings
from ebft.data.lengths import DROPPED
from ebft.data.load import LoadedRows, LoadEntry, load_sections
from ebft.data.preferences.rows import FEATURES, PreferenceRow
from ebft.data.preferences.styles import STYLES
from ebft.data.report import RowCounts


def load_preference_rows(config: DataSettings, tokenizer: PreTrainedTokenizerBase) -> LoadedRows:
    """The training rows and the evaluation rows (None if the config holds no data out).

    Columns: `prompt_ids`, and `chosen_ids` and `rejected_ids`, or `completion_ids` and `label`. Rows are not cut: those
    whose prompt and longest completion exceed `sequence_len` are dropped, with a count for each reason. Raises
    DataError if a source cannot be read, a row is malformed, or no usable rows are left.
    """
    train, evaluation, reports = load_sections(config, preference_rows(config, tokenizer), hint(config))
    evaluation = None if evaluation is None else evaluation.remove_columns("document")
    return LoadedRows(train.remove_columns("document"), evaluation, reports)


def preference_rows(config: DataSettings, tokenizer: PreTrainedTokenizerBase) -> LoadEntry:
    """Return a function that loads the usable rows of a source."""
    features = FEATURES[config.required_rows.kind]
    warned: set[str] = set()  # styles

    def load_entry(entry: Any, raw: Dataset, first_document: int, counts: RowCounts) -> Dataset:
        style = str(entry.type).partition(".")[0]
        if style in STYLES and style not in warned:
            warned.add(style)
            _warn_of_markers(tokenizer, entry.type)
        check = PreferenceRow(config, tokenizer, entry.chat_template_kwargs)
        rows = apply_transform(raw, entry, config, tokenizer, check, features, first_document, counts)
        reasons, documents = np.asarray(rows["reason"]), np.asarray(rows["document"])
        for reason in DROPPED:
            counts[reason] += int((reasons == reason).sum())
            counts.note(reason, documents[reasons == reason].tolist())
        return rows.select(np.flatnonzero(reasons == "")).remove_columns("reason")

    return load_entry


def _warn_of_markers(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Warn of split markers of a text format, unless the chat template writes them too: it has its own warning."""
    style = STYLES[name.partition(".")[0]]
    known = split_by_template(tokenizer)
    split = split_markers(tokenizer, style.system + style.user + style.end)
    warn_of_split_markers(f"datasets.type: {name}", [marker for marker in split if marker not in known])


def hint(config: DataSettings) -> str:
    """The advice if no rows are left."""
    return (
        "provide rows whose prompt and completions are not empty, and fit within sequence_len: "
        f"{config.sequence_len} together, or increase it."
    )
