"""Batches of rows of a stream, which all have the same length and need no padding.

B  rows   S  tokens
"""

from __future__ import annotations

from typing import Any

from ebft.data.joining import JoiningCollator
from ebft.data.streaming.rows import SKIPPED


class StreamCollator(JoiningCollator):
    """`JoiningCollator` that also collates rows of a stream.

    Their batch also has `position`, that of its last row, and `pieces`, the number of documents. Rows of steps before a
    checkpoint make an empty batch.
    """

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        if rows[0] == SKIPPED:
            return {}
        batch: dict[str, Any] = super().__call__(rows)
        if "position" in rows[0]:
            batch |= {"position": rows[-1]["position"], "pieces": sum(row["pieces"] for row in rows)}
        return batch
