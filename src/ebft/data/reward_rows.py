"""Rows of reward models, with the rows that cannot be used dropped and counted.

A comparison has `chosen_ids` and `rejected_ids`, and `margin` if any row has one other than 0; a row of steps has
`input_ids` and `labels`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from datasets import Features, Value
from transformers import PreTrainedTokenizerBase

from ebft.config.keys.data import DataSettings
from ebft.data.apply import IDS, WITH_REASON, check_fields, plain
from ebft.data.load import LoadedRows, load_sections, transformed_rows
from ebft.data.row_counts import NO_REPLY, NO_STEP, REPLY_TOO_LONG, TRUNCATED
from ebft.data.transforms import wanted_rows
from ebft.data.transforms.rows import IGNORE
from ebft.errors import DataError


def load_comparisons(config: DataSettings, tokenizer: PreTrainedTokenizerBase) -> LoadedRows:
    """Rows of `chosen_ids` and `rejected_ids`, and of `margin` if any is not 0.

    A pair is dropped if either text exceeds `sequence_len`.
    """
    hint = wanted_rows(config.required_rows)

    def check(row: Mapping[str, Any]) -> dict[str, Any]:
        names = ("chosen_ids", "rejected_ids")
        chosen, rejected = (_ids(row, name, hint, len(tokenizer)) for name in names)
        too_long = max(len(chosen), len(rejected)) > config.sequence_len
        reason = NO_REPLY if not (chosen and rejected) else REPLY_TOO_LONG if too_long else ""
        margin = row.get("margin", 0.0)
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
            raise DataError(f"margin must be a finite number, got {margin!r:.60}. Correct the column, or remove it.")
        return {"chosen_ids": chosen, "rejected_ids": rejected, "margin": margin, "reason": reason}

    features = Features({"chosen_ids": IDS, "rejected_ids": IDS, "margin": Value("float64"), **WITH_REASON})
    loaded = load_sections(config, transformed_rows(config, tokenizer, check, features)).without("document")
    has_margin = any(np.any(rows["margin"]) for rows in (loaded.train, loaded.evaluation) if rows is not None)
    return loaded if has_margin else loaded.without("margin")


def load_steps(config: DataSettings, tokenizer: PreTrainedTokenizerBase, num_labels: int) -> LoadedRows:
    """Rows of `input_ids` and `labels`, which are below `num_labels` or -100; cut to `sequence_len` tokens."""
    hint = wanted_rows(config.required_rows)

    def check(row: Mapping[str, Any]) -> dict[str, Any]:
        ids, labels = _ids(row, "input_ids", hint, len(tokenizer)), _ids(row, "labels", hint, num_labels)
        kept = slice(config.sequence_len)
        is_empty = all(label == IGNORE for label in labels[kept])
        reason = NO_STEP if is_empty else TRUNCATED if len(ids) > config.sequence_len else ""
        return {"input_ids": ids[kept], "labels": labels[kept], "reason": reason}

    features = Features({"input_ids": IDS, "labels": IDS, **WITH_REASON})
    return load_sections(config, transformed_rows(config, tokenizer, check, features)).without("document")


def _ids(row: Mapping[str, Any], name: str, hint: str, vocabulary: int) -> list[int]:
    """The token ids of a field; of labels, IGNORE as well."""
    check_fields(row, [name], hint)
    ids, known = plain(row[name]), range(vocabulary)
    unknown = next((token for token in ids if token not in known and (name, token) != ("labels", IGNORE)), None)
    if unknown is not None:
        raise DataError(f"{name} contains {unknown}, which is not one of {vocabulary} tokens or classes (num_labels).")
    return ids
