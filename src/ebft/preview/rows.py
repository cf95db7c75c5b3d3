"""The first rows of a run, shown as its method reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from ebft.data.streaming.rows import StreamRows
from ebft.preview.view import RowView


def first_rows(
    number: int, show: Callable[[Any], RowView], train: Any, evaluation: Any
) -> Iterator[tuple[str, RowView]]:
    """The first `number` rows for training and for evaluation (None if there are none), each with a title."""
    for purpose, rows in (("training", train), ("evaluation", evaluation)):
        if isinstance(rows, StreamRows):
            for index, row in enumerate(islice(rows.rows(), number)):
                yield f"row {index + 1:,} of the stream for {purpose}", show(row)
            continue
        for index in range(0 if rows is None else min(number, len(rows))):
            yield f"row {index + 1:,} of {len(rows):,} for {purpose}", show(rows[index])
