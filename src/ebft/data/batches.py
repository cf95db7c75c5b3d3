"""Packing of several short documents into one row, so that batches are filled regardless of document lengths."""

from __future__ import annotations

import warnings
from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from ebft.data.lengths import token_counts
from ebft.data.transforms.rows import IGNORE
from ebft.errors import DataError
from ebft.printed import say
from ebft.processes import is_main_process


class PackedRows(Dataset):
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


_MASKS = ("completion_mask", "assistant_masks")  # of TRL


def pack_and_report(rows: Any, length: int) -> PackedRows:
    """`pack_rows`, with a line on the terminal about the result."""
    packed = pack_rows(rows, length)
    if is_main_process():
        full = sum(packed.lengths) / (len(packed) * length)
        before, after = (f"{count:,} row{'s' * (count != 1)}" for count in (len(rows), len(packed)))
        say(f"Packed {before} into {after} of up to {length} tokens ({full:.0%} full)", err=True)
    return packed


def pack_rows(rows: Any, length: int) -> PackedRows:
    """Pack the rows of a dataset (with `input_ids`) by best fit, longest first, into rows of up to `length` tokens.

    A longer row is not packed with others. Packing is deterministic.
    """
    sizes = token_counts(rows)
    packs: list[list[int]] = []
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
        trained = lambda row, mask: torch.stack([mask, *(torch.as_tensor(row[n]) for n in _MASKS if n in row)]).prod(0)
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
                raise DataError(f"row {row} of a batch has {sizes}; they must have the same length")
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
    if "labels" not in row and not row.keys().isdisjoint(_MASKS):
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
