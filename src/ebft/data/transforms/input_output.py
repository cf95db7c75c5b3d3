"""Texts in segments, without a template: `{segments}` -> `{input_ids, labels, prompt_length, turn_spans}`.

A segment is `{text, label}`; those with `label: true` are trained on. Each is tokenised on its own, and no special
tokens are added, so that the segments contain all of them.
"""

from itertools import accumulate, groupby
from typing import Any

from ebft.data.transforms.rows import encode, first_present, segments_row
from ebft.errors import DataError


def transform(cfg, dataset, **kwargs):
    """Transform for rows of segments."""
    train_on_inputs = cfg.train_on_inputs
    columns = [dataset.field] if dataset.field else ["segments"]

    def transform_fn(example, tokenizer=None):
        column = first_present(example, columns, "segments", "Set `field` of the entry to its name.")
        segments = [
            (encode(tokenizer, text, special=False), label) for text, label in _segments(example[column], column)
        ]
        joined = [
            ([token for ids, _ in group for token in ids], label)
            for label, group in groupby((segment for segment in segments if segment[0]), key=lambda segment: segment[1])
        ]
        row = segments_row(joined or [([], True)], train_on_inputs)
        ends = list(accumulate(len(ids) for ids, _ in joined))
        row["turn_spans"] = [[end - len(ids), end] for end, (ids, label) in zip(ends, joined) if label]
        if joined and not joined[-1][1] and len(joined) > 1:
            row["prompt_length"] -= len(joined[-2][0])  # the last segment is not trained on
        return row

    return transform_fn, {"remove_columns": "__all__"}


def _segments(value: Any, column: str) -> list[tuple[str, bool]]:
    """The segments with a text. Raises DataError for another shape."""
    for number, segment in enumerate(value or []):
        if not isinstance(segment, dict) or not isinstance(segment.get("label"), bool):
            raise DataError(f"column {column!r}, segment {number}: expected {{text: ..., label: true or false}}.")
        if not isinstance(segment.get("text"), str | None):
            raise DataError(f"column {column!r}, segment {number}: text must be text, got {segment['text']!r:.60}.")
    return [(segment["text"], segment["label"]) for segment in value or [] if segment.get("text")]
