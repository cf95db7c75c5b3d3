"""Running a transform over raw rows, and holding what it returns to the fields that training needs."""

from collections.abc import Callable, Mapping
from typing import Any

from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from ebft.data.config_view import ConfigView
from ebft.data.transforms import STRUCTURED_HINT, find_transform
from ebft.data.transforms.rows import IGNORE
from ebft.errors import DataError

FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "prompt_length": Value("int32"),
        "document": Value("int64"),
    }
)


def tokenise(
    raw: Dataset, entry: Any, config: Any, tokenizer: PreTrainedTokenizerBase, first_document: int = 0
) -> Dataset:
    """Rows of `input_ids`, `labels`, `prompt_length` and `document`, the number of the raw row.

    `entry` is the dataset entry whose `type` names the transform, numbers start at `first_document`. Padding that
    a transform put behind a text is taken off. Raises DataError naming the transform, the row and the field.
    """
    transform_fn, map_kwargs = _build(entry, config)
    removed = map_kwargs.pop("remove_columns", [])
    removed = raw.column_names if removed == "__all__" else removed
    step = _Step(
        f"{entry.path}, {entry.split}: transform {entry.type!r}", transform_fn, tokenizer, set(removed), first_document
    )
    map_kwargs = {"num_proc": config.dataset_num_proc if config.dataset_num_proc > 1 else None, **map_kwargs}
    return raw.map(
        step.batch if map_kwargs.get("batched") else step.row,
        with_indices=True,
        remove_columns=raw.column_names,
        features=FEATURES,
        # A cached result does not notice that a transform's helper functions were edited.
        load_from_cache_file=False,
        desc=f"Tokenising {entry.path}",
        **map_kwargs,
    )


def _build(entry: Any, config: Any) -> tuple[Callable, dict[str, Any]]:
    built = find_transform(entry.type)(ConfigView(config), dataset=entry)
    if not isinstance(built, tuple) or len(built) != 2 or not callable(built[0]) or not isinstance(built[1], dict):
        raise DataError(
            f"transform {entry.type!r} returned {type(built).__name__}; it must return (transform_fn, map_kwargs), "
            'for instance `return transform_fn, {"remove_columns": "__all__"}`.'
        )
    return built[0], dict(built[1])


class _Step:
    """One call of `Dataset.map`: the transform, its errors told with their row, its fields checked."""

    def __init__(
        self,
        name: str,
        transform_fn: Callable,
        tokenizer: PreTrainedTokenizerBase,
        removed: set[str],
        first_document: int,
    ) -> None:
        self.name, self.transform_fn, self.tokenizer = name, transform_fn, tokenizer
        self.removed, self.first_document = removed, first_document

    def row(self, example: dict[str, Any], index: int) -> dict[str, Any]:
        where = f"{self.name}, row {index}"
        return {**_checked(self._call(example, where), where), "document": self.first_document + index}

    def batch(self, examples: dict[str, list], indices: list[int]) -> dict[str, list]:
        """For transforms with `batched: true`, which may return more or fewer rows than they were given."""
        where = f"{self.name}, rows {indices[0]}-{indices[-1]}"
        result = self._call(examples, where)
        counts = {field: len(values) for field, values in result.items()}
        if len(set(counts.values())) > 1:
            raise DataError(f"{where}: fields of different length {counts}.")
        rows = [dict(zip(result, values)) for values in zip(*result.values())]
        checked = [_checked(row, f"{where}, result {number}") for number, row in enumerate(rows)]
        # Which raw row a result came from is unknown where the number of rows changed; the batch stays together.
        documents = indices if len(rows) == len(indices) else [indices[0]] * len(rows)
        columns = {field: [row[field] for row in checked] for field in ("input_ids", "labels", "prompt_length")}
        return {**columns, "document": [self.first_document + index for index in documents]}

    def _call(self, example: dict[str, Any], where: str) -> dict[str, Any]:
        try:
            result = self.transform_fn(example, tokenizer=self.tokenizer)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        except Exception as error:  # a transform of the user's own may raise anything
            raise DataError(
                f"{where}: {type(error).__name__}: {error}. The row has the columns {', '.join(example)}."
            ) from error
        if not isinstance(result, Mapping):
            raise DataError(f"{where}: it returned {type(result).__name__}, it must return a dict of fields.")
        return {**{key: value for key, value in example.items() if key not in self.removed}, **result}


def _checked(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of one row, without padding; DataError names the field that is missing or malformed."""
    for field in ("input_ids", "labels"):
        if field not in row and "prompt" in row and "ground_truth" in row:
            raise DataError(f"{where}: it returned prompt and ground_truth, which belong to {STRUCTURED_HINT}")
        if field not in row:
            raise DataError(
                f"{where}: the field {field!r} is missing, it returned {', '.join(row)}. Training on tokens needs "
                "input_ids and labels, and prompt_length for rows with a prompt."
            )
    input_ids, labels = (_integers(row[field], field, where) for field in ("input_ids", "labels"))
    if len(labels) != len(input_ids):
        raise DataError(f"{where}: labels has {len(labels)} entries, input_ids has {len(input_ids)}.")
    length = _real_length(row, len(input_ids), where)
    prompt_length = row.get("prompt_length", _leading_masked(labels))
    if isinstance(prompt_length, bool) or not isinstance(prompt_length, int) or prompt_length < 0:
        raise DataError(f"{where}: prompt_length must be a whole number from 0, it is {prompt_length!r}.")
    return {"input_ids": input_ids[:length], "labels": labels[:length], "prompt_length": prompt_length}


def _leading_masked(labels: list[int]) -> int:
    """Where labels begin: the prompt of a row that does not say, 0 for a row without labels."""
    return next((index for index, label in enumerate(labels) if label != IGNORE), 0)


def _real_length(row: Mapping[str, Any], length: int, where: str) -> int:
    if "attention_mask" not in row:
        return length
    mask = _integers(row["attention_mask"], "attention_mask", where)
    real = sum(mask)
    if len(mask) != length or mask != [1] * real + [0] * (length - real):
        raise DataError(
            f"{where}: attention_mask must be ones followed by zeros, as long as input_ids. Do not pad on the left; "
            "rows need no padding at all."
        )
    return real


def _integers(values: Any, field: str, where: str) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        raise DataError(f"{where}: {field} must be a list of token numbers, it is {str(values)[:60]}.")
    return values
