"""Batches in which the documents of a packed row are one sequence, separated by their positions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ebft.data.collator import DocumentCollator
from ebft.data.transforms.rows import IGNORE


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
