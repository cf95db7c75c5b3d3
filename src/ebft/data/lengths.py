"""Cutting rows to `sequence_len` and dropping those that cannot be trained on, with a count for each reason."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from ebft.anchors import BlockOptions, count_row_blocks
from ebft.config.keys.data import DataSettings
from ebft.data import row_counts
from ebft.data.apply import FEATURES
from ebft.data.rendering import ChatTemplate
from ebft.data.tables import map_rows, rows_at_once
from ebft.data.transforms.rows import IGNORE

_TOKENS = ("input_ids", "labels")


def block_options(config: DataSettings, ebft: Any, tokenizer: Any) -> BlockOptions:
    """The options `ebft` of blocks, with the tokens that end a text, and the length at which texts are cut."""
    are_cut = config.excess_length_strategy not in ("drop", "raise")
    ends = ChatTemplate(tokenizer, kwargs=config.required_rows.chat_template_kwargs).end_ids
    return BlockOptions.of(ebft, ends, config.sequence_len if are_cut else None)


def has_block(row: dict[str, Any], options: BlockOptions) -> bool:
    """Whether a turn of a row has an anchor."""
    return count_row_blocks(row["input_ids"], row["prompt_length"], row["turn_spans"], options) > 0


def cut_and_drop(rows: Dataset, config: DataSettings, tokenizer: Any, counts: row_counts.RowCounts) -> Dataset:
    """Usable rows of at most `sequence_len` tokens; cut and dropped rows are added to `counts` by reason.

    Without `excess_length_strategy`, text without a prompt is cut into consecutive windows, and rows with a prompt are
    truncated; "raise" drops them, for the caller to raise an error. If the method samples blocks, rows without one are
    dropped, else those without a token to predict.
    """
    kept = map_rows(
        rows.with_format("arrow"),
        _Cutter(config, tokenizer, counts),  # it counts rows, so this runs in one process
        batched=True,
        batch_size=rows_at_once(rows),
        remove_columns=rows.column_names,
        features=FEATURES,
        desc="Cutting rows",
    )
    kept.reset_format()
    return kept


class _Cutter:
    """A batched map function that counts cut and dropped rows."""

    def __init__(self, config: DataSettings, tokenizer: Any, counts: row_counts.RowCounts) -> None:
        self.sequence_len, self.strategy, self.counts = config.sequence_len, config.excess_length_strategy, counts
        ebft = config.required_rows.block
        self.block = None if ebft is None else block_options(config, ebft, tokenizer)
        self.too_short, self.tail = row_counts.TOO_SHORT, row_counts.TAIL
        if ebft is None:
            self.too_short, self.tail = row_counts.ONE_TOKEN, row_counts.NOTHING_TO_PREDICT
        # A window with only masked thinking has no labels, but its rollouts can still be trained on.
        self.needs_labels = ebft is None or not ebft.mask_thinking_ce

    def __call__(self, batch: pa.Table) -> dict[str, list]:
        out: dict[str, list] = {field: [] for field in FEATURES}
        columns = [arrays_of(batch[field]) if field in _TOKENS else batch[field].to_pylist() for field in FEATURES]
        for values in zip(*columns):
            for row in self._pieces(dict(zip(FEATURES, values))):
                for field in FEATURES:
                    out[field].append(row[field])
        return out

    def fits(self, row: dict[str, Any]) -> bool:
        """Strided mode needs room for one block, cross-entropy a token that has a successor."""
        return len(row["input_ids"]) > 1 if self.block is None else has_block(row, self.block)

    def _pieces(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """The rows that a row is replaced with: itself, its beginning, its windows, or none."""
        length, prompt_length = len(row["input_ids"]), row["prompt_length"]
        if prompt_length is None:
            return self._drop(row, row_counts.NO_PROMPT)
        if length == 0:
            return self._drop(row, row_counts.EMPTY)
        if prompt_length >= length or (row["labels"] == IGNORE).all():
            return self._drop(row, row_counts.NO_REFERENCE)
        is_cut = length > self.sequence_len
        if is_cut:
            if self.strategy in ("drop", "raise"):
                return self._drop(row, row_counts.TOO_LONG)
            if self.strategy is None and prompt_length == 0:
                return self._windows(row)
        cut = _window(row, 0, self.sequence_len)
        if not self.fits(cut):
            return self._drop(row, row_counts.PROMPT_TOO_LONG if is_cut else self.too_short)
        if self.needs_labels and not _learns(cut["labels"]):
            return self._drop(row, row_counts.PROMPT_TOO_LONG if is_cut else row_counts.NO_REFERENCE)
        if is_cut:
            self.counts.add(row_counts.TRUNCATED, [row["document"]])
        if prompt_length >= self.sequence_len:  # the end of a chat was cut, but earlier turns are trained on
            return [_up_to_last_turn(cut)]
        return [cut]

    def _windows(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self.counts.add(row_counts.SPLIT, [row["document"]])
        kept = []
        for start in range(0, len(row["input_ids"]), self.sequence_len):
            window = _window(row, start, start + self.sequence_len)
            if self.fits(window) and _learns(window["labels"]):
                kept.append(window)
            else:
                self.counts.add(self.tail, [row["document"]])
        return kept

    def _drop(self, row: dict[str, Any], reason: str) -> list[dict[str, Any]]:
        self.counts.add(reason, [row["document"]])
        return []


def arrays_of(column: pa.ChunkedArray) -> Iterator[np.ndarray]:
    """The rows of a column of lists of numbers, without copies: Python's numbers would take ten times the memory."""
    return (row.values.to_numpy() for row in column)


def _learns(labels: np.ndarray) -> bool:
    """Whether there is a label that is predicted; nothing predicts the first token."""
    return bool((labels[1:] != IGNORE).any())


def _up_to_last_turn(row: dict[str, Any]) -> dict[str, Any]:
    """The row up to the end of the last turn with labels, which begins at its new `prompt_length`."""
    labels = row["labels"].tolist()
    stop = max((place for place, label in enumerate(labels) if label != IGNORE), default=-1) + 1
    if row["turn_spans"]:  # whose last tokens may be masked
        start, end = row["turn_spans"][-1]
        return {**_window(row, 0, max(stop, end)), "prompt_length": start}
    start = next((place for place in range(stop - 1, 0, -1) if labels[place - 1] == IGNORE), 0)
    return {**_window(row, 0, stop), "prompt_length": start}


def _window(row: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """The tokens [start, stop) of a row, with the parts of its turns among them."""
    turns = [[max(first, start) - start, min(last, stop) - start] for first, last in row["turn_spans"]]
    return {
        **row,
        "input_ids": row["input_ids"][start:stop],
        "labels": row["labels"][start:stop],
        "turn_spans": [[first, last] for first, last in turns if first < last],
    }


def without_repeated(rows: Dataset, counts: row_counts.RowCounts) -> Dataset:
    """The rows without those that are equal to an earlier one in all but `document`, which are counted."""
    first: dict[bytes, int] = {}  # the number of the first row with each hash
    dropped: list[int] = []
    for number, row in enumerate(rows):
        document = row.pop("document")
        found = hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).digest()
        if first.setdefault(found, number) != number:
            dropped.append(document)
    counts.add(row_counts.REPEATED, dropped)
    return rows.select(list(first.values())) if dropped else rows


def token_counts(rows: Any, column: str = "input_ids") -> list[int]:
    """Number of tokens in each row of a Dataset or another sequence of rows."""
    if not isinstance(rows, Dataset):
        return [len(row[column]) for row in rows]
    tables = rows.with_format("arrow").iter(batch_size=10_000)
    return [count for table in tables for count in pc.list_value_length(table[column]).to_pylist()]


def longest_document(*sections: Any) -> int | None:
    """Number of tokens of the longest text that the model reads in rows of these sections, which may be None.

    None for streams, whose rows are not known, and for prompts, which completions follow.
    """
    lengths = [_longest(rows) for rows in sections if rows is not None]
    return None if None in lengths else max(lengths, default=None)


def _longest(rows: Any) -> int | None:
    columns = set(rows.column_names) if isinstance(rows, Dataset) else set()
    most = lambda *names: max(map(sum, zip(*(token_counts(rows, name) for name in names))), default=0)
    if "input_ids" in columns:
        return most("input_ids")
    if "completion_ids" in columns:  # KTO also scores prompts with the completions of other rows
        return most("prompt_ids") + most("completion_ids")
    if "chosen_ids" in columns:
        prompt = ["prompt_ids"] if "prompt_ids" in columns else []
        return max(most(*prompt, name) for name in ("chosen_ids", "rejected_ids"))
    return None
