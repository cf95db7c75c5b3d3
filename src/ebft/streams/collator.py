"""Batches of rows of a stream, which all have the same length and need no padding.

B  rows   S  tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ebft.data.collator import DocumentCollator
from ebft.data.streaming.rows import SKIPPED


@dataclass
class StreamCollator(DocumentCollator):
    """`DocumentCollator` that also collates rows of a stream: `input_ids`, `labels`, and `position_ids` (B, S).

    The positions of a row begin at 0 with each document, from which transformers derives that documents do not attend
    to each other, if there is no attention mask. `flatten`: batches of one row of B * S tokens, as FlashAttention needs
    them for that. The batch of a stream also has `position`, of its last row, and `pieces`, the number of documents.
    """

    with_prompt_length: bool = False
    flatten: bool = False

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        if rows[0] == SKIPPED:
            return {}
        batch: dict[str, Any] = super().__call__(rows)
        if "position" not in rows[0]:
            return batch
        del batch["attention_mask"]
        if self.flatten and "position_ids" in batch:
            batch = {name: tensor.reshape(1, -1) for name, tensor in batch.items()}
        return {**batch, "position": rows[-1]["position"], "pieces": sum(row["pieces"] for row in rows)}
