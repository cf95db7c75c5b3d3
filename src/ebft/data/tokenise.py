"""Rows of tokens: checks that a transform returned the fields that training on tokens requires."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from ebft.data.apply import Check, apply_transform, row_function
from ebft.data.keys import DataSettings
from ebft.data.transforms.names import wanted_rows
from ebft.data.transforms.rows import IGNORE
from ebft.errors import DataError

if TYPE_CHECKING:
    from ebft.data.lengths import RowCounts

FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "prompt_length": Value("int32"),
        "turn_spans": List(List(Value("int32"))),
        "document": Value("int64"),
    }
)


def tokenise(
    raw: Dataset,
    entry: Any,
    config: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    first_document: int = 0,
    counts: RowCounts | None = None,
) -> Dataset:
    """Rows of `input_ids`, `labels`, `prompt_length`, `turn_spans` and `document`, the number of the raw row.

    `entry` is the dataset entry whose `type` names the transform; numbers start at `first_document`. Padding at the
    end of a row is removed. Raises DataError that names the transform, the row and the field.
    """
    return apply_transform(raw, entry, config, tokenizer, _check(config, tokenizer), FEATURES, first_document, counts)


def tokeniser(
    entry: Any, config: DataSettings, tokenizer: PreTrainedTokenizerBase
) -> Callable[[dict[str, Any], int], dict[str, Any]]:
    """Return the function that `tokenise` calls for each raw row and its number in the source."""
    return row_function(entry, config, tokenizer, _check(config, tokenizer))


def _check(config: DataSettings, tokenizer: PreTrainedTokenizerBase) -> Check:
    return partial(_checked, hint=wanted_rows(config.required_rows), vocabulary=len(tokenizer))


def _checked(row: Mapping[str, Any], where: str, hint: str, vocabulary: int) -> dict[str, Any]:
    """The fields of one row, without padding. Raises DataError that names a missing or malformed field."""
    for field in ("input_ids", "labels"):
        if field not in row and "prompt" in row and "ground_truth" in row:
            raise DataError(f"{where}: the transform returned prompt and ground_truth, but {hint}")
        if field not in row:
            raise DataError(
                f"{where}: the field {field!r} is missing; the transform returned {', '.join(row)}. Training on tokens "
                "requires input_ids and labels, and prompt_length for rows with a prompt."
            )
    input_ids, labels = (_integers(row[field], field, where) for field in ("input_ids", "labels"))
    if len(labels) != len(input_ids):
        raise DataError(f"{where}: labels has {len(labels)} entries, but input_ids has {len(input_ids)}.")
    _check_range(input_ids, "input_ids", vocabulary, where)
    if labels != input_ids:
        _check_range([label for label in labels if label != IGNORE], "labels", vocabulary, where)
    length = _real_length(row, len(input_ids), where)
    prompt_length = row.get("prompt_length", _leading_masked(labels))
    if isinstance(prompt_length, bool) or not isinstance(prompt_length, int) or prompt_length < 0:
        raise DataError(f"{where}: prompt_length must be a non-negative integer, got {prompt_length!r}.")
    if prompt_length > length:
        raise DataError(
            f"{where}: prompt_length is {prompt_length}, but the row has {length} tokens. It is the number of tokens "
            "before the reference, which follows them in input_ids."
        )
    return {
        "input_ids": input_ids if length == len(input_ids) else input_ids[:length],
        "labels": labels if length == len(labels) else labels[:length],
        "prompt_length": prompt_length,
        "turn_spans": _turn_spans(row.get("turn_spans"), length, where),
    }


def _turn_spans(values: Any, length: int, where: str) -> list[list[int]]:
    """The (start, end) pairs of a row of `length` tokens. Raises DataError unless they are in order and within it."""
    values = values.tolist() if hasattr(values, "tolist") else [] if values is None else values
    try:
        pairs = [[start, end] for start, end in values]
    except (TypeError, ValueError):
        pairs = [["", ""]]
    places = [place for pair in pairs for place in pair]
    if (
        not set(map(type, places)) <= {int}
        or any(start >= end for start, end in pairs)
        or [0, *places, length] != sorted([0, *places, length])
    ):
        raise DataError(
            f"{where}: turn_spans must be (start, end) pairs of positions within the row's {length} tokens, in order "
            f"and without overlaps, got {str(values)[:60]}."
        )
    return pairs


def _check_range(ids: list[int], field: str, vocabulary: int, where: str) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        outside = min(ids) if min(ids) < 0 else max(ids)
        raise DataError(
            f"{where}: {field} contains {outside}, but the tokenizer's vocabulary has {vocabulary} tokens. Use the "
            f"tokenizer that the transform receives{f', and {IGNORE} for ignored labels' if field == 'labels' else ''}."
        )


def _leading_masked(labels: list[int]) -> int:
    """Index of the first label: the default of `prompt_length`; 0 for a row without labels."""
    return next((index for index, label in enumerate(labels) if label != IGNORE), 0)


def _real_length(row: Mapping[str, Any], length: int, where: str) -> int:
    if "attention_mask" not in row:
        return length
    mask = _integers(row["attention_mask"], "attention_mask", where)
    real = sum(mask)
    if len(mask) != length or mask != [1] * real + [0] * (length - real):
        raise DataError(
            f"{where}: attention_mask must be ones followed by zeros, with the length of input_ids. Do not pad on the "
            "left; rows do not need padding."
        )
    return real


def _integers(values: Any, field: str, where: str) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        raise DataError(f"{where}: {field} must be a list of token ids, got {str(values)[:60]}.")
    return values
