"""Collating pairs for the trainers that run chosen and rejected sequences side by side.

B  rows   S  tokens of the longest sequence of a side
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ebft.data.transforms.rows import IGNORE


@dataclass
class PairCollator:
    """Pads rows of `prompt_ids`, `chosen_ids` and `rejected_ids` on the right.

    The batch contains `input_ids`, `attention_mask` and `labels` (B, S) of both sides, with the prefix `chosen_` or
    `rejected_`; labels are -100 for prompts and padding.
    """

    pad_token_id: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = {}
        for side in ("chosen", "rejected"):
            sequences = [row["prompt_ids"] + row[f"{side}_ids"] for row in rows]
            labels = [[IGNORE] * len(row["prompt_ids"]) + row[f"{side}_ids"] for row in rows]
            batch[f"{side}_input_ids"] = _padded(sequences, self.pad_token_id)
            batch[f"{side}_attention_mask"] = _padded([[1] * len(ids) for ids in sequences], 0)
            batch[f"{side}_labels"] = _padded(labels, IGNORE)
        return batch


def _padded(rows: list[list[int]], value: int) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)
