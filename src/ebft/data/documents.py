"""Documents as rows of token ids: cut to `sequence_len`, dropped where they cannot be trained on (counted by reason),
packed, and padded to batches."""

from __future__ import annotations

import hashlib
import json
import warnings
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import pad

from ebft import anchors, errors, machine, printed
from ebft.config.keys.data import DataSettings
from ebft.data import row_counts
from ebft.data.apply import FEATURES
from ebft.data.rendering import ChatTemplate
from ebft.data.tables import map_rows, rows_at_once
from ebft.data.transforms.rows import IGNORE, MASKS

_TOKENS = ("input_ids", "labels")


def block_options(config: DataSettings, ebft: Any, tokenizer: Any) -> anchors.BlockOptions:
    """The options `ebft` of blocks, with the tokens that end a text, and the length at which texts are cut."""
    are_cut = config.excess_length_strategy not in ("drop", "raise")
    ends = ChatTemplate(tokenizer, kwargs=config.required_rows.chat_template_kwargs).end_ids
    return anchors.BlockOptions.of(ebft, ends, config.sequence_len if are_cut else None)


def has_block(row: dict[str, Any], options: anchors.BlockOptions) -> bool:
    """Whether a turn of a row has an anchor."""
    return anchors.count_row_blocks(row["input_ids"], row["prompt_length"], row["turn_spans"], options) > 0


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
        desc="Checking rows",
    )
    kept.reset_format()
    return kept


class _Cutter:
    """A batched map function that counts cut and dropped rows."""

    def __init__(self, config: DataSettings, tokenizer: Any, counts: row_counts.RowCounts) -> None:
        self.sequence_len, self.strategy, self.counts = config.sequence_len, config.excess_length_strategy, counts
        self.fewest, ebft = config.min_sample_len or 1, config.required_rows.block
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
        if length < self.fewest:
            return self._drop(row, row_counts.BELOW_MINIMUM)
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


class PackedRows(torch.utils.data.Dataset):
    """Rows `{"documents": [...]}`, each the rows of another dataset that were packed together.

    Documents of a row do not attend to each other. `DocumentCollator` splits them again, for the strided trainer, which
    concatenates all documents of a batch; `JoiningCollator` concatenates the documents of
    each row. `lengths` are the numbers of tokens per row.
    """

    def __init__(self, rows: Any, packs: list[list[int]], lengths: list[int]):
        self.rows, self.packs, self.lengths = rows, packs, lengths

    def __len__(self) -> int:
        return len(self.packs)

    def select(self, indices: list[int]) -> PackedRows:
        """Return these rows only, in this order."""
        return PackedRows(self.rows, [self.packs[i] for i in indices], [self.lengths[i] for i in indices])

    def __getitem__(self, index: int) -> dict[str, list[dict[str, Any]]]:
        return {"documents": [self.rows[i] for i in self.packs[index]]}


def pack_and_report(rows: Any, length: int, in_order: bool = False) -> PackedRows:
    """`pack_rows`, with a line on the terminal about the result."""
    packed = pack_rows(rows, length, in_order)
    if machine.is_main_process():
        full = sum(packed.lengths) / (len(packed) * length)
        before, after = (f"{count:,} row{'s' * (count != 1)}" for count in (len(rows), len(packed)))
        printed.say(f"Packed {before} into {after} of up to {length} tokens ({full:.0%} full)", err=True)
    return packed


def pack_rows(rows: Any, length: int, in_order: bool = False) -> PackedRows:
    """Pack the rows of a dataset (with `input_ids`) by best fit, longest first, into rows of up to `length` tokens.

    A longer row is not packed with others. Packing is deterministic. `in_order`: of neighbours only.
    """
    sizes = token_counts(rows)
    packs: list[list[int]] = []
    if in_order:
        left = 0
        for index, size in enumerate(sizes):
            packs += [[]] if size > left else []
            left = (length if size > left else left) - size
            packs[-1].append(index)
        return PackedRows(rows, packs, [sum(sizes[index] for index in pack) for pack in packs])
    room: dict[int, list[int]] = defaultdict(list)  # packs by their number of free tokens
    free: list[int] = []  # the keys of `room`, ascending
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[index]
        at = bisect_left(free, size)
        if at == len(free):
            pack, left = len(packs), length - size
            packs.append([])
        else:
            pack, left = room[free[at]].pop(), free[at] - size
            if not room[free[at]]:
                free.pop(at)
        packs[pack].append(index)
        if left > 0:
            if not room[left]:
                insort(free, left)
            room[left].append(pack)
    return PackedRows(rows, packs, [sum(sizes[index] for index in pack) for pack in packs])


class JoiningCollator:
    """`DocumentCollator` for a plain causal LM: a packed row (`documents`) stays one row.

    The batch then contains `position_ids`, which start at 0 in every document. The first token of a row has no label,
    because there is nothing to predict it from: transformers counts it for models that are not in its table of losses.
    """

    def __init__(self, pad_token_id: int) -> None:
        self._collate = DocumentCollator(pad_token_id, with_prompt_length=False)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = self._collate([joined(row["documents"]) if "documents" in row else row for row in rows])
        batch["labels"][:, 0] = IGNORE
        return batch


def joined(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The documents as one row. The first token of each has no label: the token before it is of another document."""
    labels = [list(document.get("labels", document["input_ids"])) for document in documents]
    return {
        "input_ids": [token for document in documents for token in document["input_ids"]],
        "labels": [label for own in labels for label in (IGNORE, *own[1:])],
        "seq_lengths": [len(document["input_ids"]) for document in documents],
    }


@dataclass
class DocumentCollator:
    """Pads the rows of a batch to the longest one; a packed row (`documents`) is replaced with the rows in it.

    Rows contain `input_ids`, and optionally `labels` (default: all tokens, or those that TRL's `completion_mask` and
    `assistant_masks` select), `attention_mask` (default: all ones), `prompt_length` and `turn_spans`, (start, end)
    pairs (default: one turn, or each run of tokens that TRL's masks select); rows of several documents also
    `position_ids`, or the documents' `seq_lengths`. The batch contains long tensors `input_ids`, `attention_mask`,
    `labels` (B, S), `prompt_length` (B,) if any row has one (otherwise the strided
    trainer derives it from the labels), `turn_spans` (B, turns, 2), padded with zeros, if any row has some, and
    `position_ids` (B, S) if any row has them. With `with_prompt_length` false, `prompt_length` and `turn_spans` are
    left out, since plain causal models do not accept them.
    """

    pad_token_id: int
    with_prompt_length: bool = True

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        rows = [document for row in rows for document in row.get("documents", [row])]
        counted = lambda row: [place for length in row["seq_lengths"] for place in range(length)]
        rows = [row if row.get("seq_lengths") is None else {**row, "position_ids": counted(row)} for row in rows]
        given = lambda row, name: torch.as_tensor(row[name], dtype=torch.long) if name in row else None
        ids, masks, labels = ([given(row, name) for row in rows] for name in ("input_ids", "attention_mask", "labels"))
        masks = [torch.ones_like(tokens) if mask is None else mask for tokens, mask in zip(ids, masks)]
        trained = lambda row, mask: torch.stack([mask, *(torch.as_tensor(row[n]) for n in MASKS if n in row)]).prod(0)
        labels = [
            tokens.masked_fill(trained(row, mask) == 0, IGNORE) if label is None else label
            for row, tokens, mask, label in zip(rows, ids, masks, labels)
        ]
        positions = [None if row.get("position_ids") is None else given(row, "position_ids") for row in rows]
        places = [torch.arange(len(x)) if place is None else place for place, x in zip(positions, ids)]
        columns = {"input_ids": ids, "attention_mask": masks, "labels": labels, "position_ids": places}
        for row, found in enumerate(zip(*columns.values())):
            if len(set(map(len, found))) > 1:
                sizes = ", ".join(f"{len(values)} {name}" for name, values in zip(columns, found))
                raise errors.DataError(f"row {row} of a batch has {sizes}; they must have the same length")
        fill = {"input_ids": self.pad_token_id, "labels": IGNORE}
        batch = {name: _padded(values, fill.get(name, 0)) for name, values in columns.items()}
        if all(place is None for place in positions):
            del batch["position_ids"]
        prompts = [row.get("prompt_length") for row in rows]
        if self.with_prompt_length and any(length is not None for length in prompts):
            masked = [(*label.ne(IGNORE).nonzero().flatten().tolist(), len(label))[0] for label in labels]
            lengths = [first if length is None else int(length) for first, length in zip(masked, prompts)]
            batch["prompt_length"] = torch.tensor(lengths)
        turns: list[Tensor] = []
        for row, mask, label, position in zip(rows, masks, labels, positions) if self.with_prompt_length else ():
            turns += _turns(row, label[mask.bool()], None if position is None else position[mask.bool()])
        if any(map(len, turns)):
            batch["turn_spans"] = _padded(turns, 0)
        return batch


def _turns(row: dict[str, Any], labels: Tensor, positions: Tensor | None) -> list[Tensor]:
    """The turns (turns, 2) of each document of a row: those given, or the runs of TRL's masks; empty without both."""
    if row.get("turn_spans"):
        return [torch.as_tensor(row["turn_spans"], dtype=torch.long)]
    starts = [0] if positions is None else positions.eq(0).nonzero().flatten().tolist()
    edges = [pad(part.ne(IGNORE).int(), (1, 1)).diff() for part in labels.tensor_split(starts[1:])]
    runs = [torch.stack([edge.eq(sign).nonzero().flatten() for sign in (1, -1)], dim=-1) for edge in edges]
    if "labels" not in row and not row.keys().isdisjoint(MASKS):
        return runs
    if any(len(of_document) > 1 for of_document in runs):
        warnings.warn(
            "A row has masked labels between others and no turn_spans: rollouts replace the masked tokens too. Add a "
            "column turn_spans with the (start, end) of each turn to train on.",
            stacklevel=3,
        )
    return [labels.new_empty(0, 2)] * len(runs)


def _padded(rows: list[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
