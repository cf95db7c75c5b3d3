"""Rows to a batch: padding on the right, nothing else."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ebft.data.transforms.rows import IGNORE


@dataclass
class DocumentCollator:
    """Pads the rows of a batch to its longest row.

    Rows hold `input_ids`, and optionally `labels` (else every token is one), `attention_mask` (else all ones) and
    `prompt_length`. The batch holds long tensors `input_ids`, `attention_mask`, `labels` (B, S), and `prompt_length`
    (B,) where every row has one (the strided trainer else reads it off the labels), unless `with_prompt_length` is
    false, as plain causal models do not take it.
    """

    pad_token_id: int
    with_prompt_length: bool = True

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        ids = [torch.as_tensor(row["input_ids"], dtype=torch.long) for row in rows]
        masks = [
            torch.as_tensor(row["attention_mask"], dtype=torch.long)
            if "attention_mask" in row
            else torch.ones_like(tokens)
            for row, tokens in zip(rows, ids)
        ]
        labels = [
            torch.as_tensor(row["labels"], dtype=torch.long)
            if "labels" in row
            else tokens.masked_fill(mask == 0, IGNORE)
            for row, tokens, mask in zip(rows, ids, masks)
        ]
        batch = {
            "input_ids": _padded(ids, self.pad_token_id),
            "attention_mask": _padded(masks, 0),
            "labels": _padded(labels, IGNORE),
        }
        if self.with_prompt_length and all("prompt_length" in row for row in rows):
            batch["prompt_length"] = torch.tensor([int(row["prompt_length"]) for row in rows])
        return batch


def _padded(rows: list[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
