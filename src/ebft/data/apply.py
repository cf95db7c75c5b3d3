"""Applying a transform to raw rows, with error messages that name the transform and the row."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from ebft.config.section import Section
from ebft.config.user_code import named_call, state_kept, user_code
from ebft.data.json_files import without_added_keys
from ebft.data.keys import DataSettings
from ebft.data.tables import map_rows
from ebft.data.transforms import find_transform
from ebft.data.transforms.omissions import LEFT_OUT, UNTHINKING, take_left_out
from ebft.errors import DataError, EBFTError, cause

NAMED = 3  # documents that are named per reason
_NOTED = "left_out"  # column of rows with thinking that the chat template leaves out
# Converts a transformed row, given its fields and its location for messages, to columns.
Check = Callable[[Mapping[str, Any], str], dict[str, Any]]


class RowCounts(Counter):
    """Number of rows by reason, with the first documents of each reason."""

    def __init__(self) -> None:
        super().__init__()
        self.documents: dict[str, list[int]] = defaultdict(list)

    def note(self, reason: str, documents: list[int]) -> None:
        """Remember some of the documents of a reason, without counting them."""
        known = self.documents[reason]
        known += [document for document in dict.fromkeys(documents) if document not in known][: NAMED - len(known)]


class ConfigView(Mapping):
    """The config that transforms are called with: keys are attributes and, as in other trainers, items of a mapping.

    Transforms may read any key of a run, so the config is passed on as it was given; unknown keys are absent.
    """

    def __init__(self, config: Section) -> None:
        self._config = config

    def __getattr__(self, key: str) -> Any:
        return getattr(self.__dict__["_config"], key)

    def __getitem__(self, key: str) -> Any:
        if key not in type(self._config).model_fields:
            raise KeyError(key)
        return getattr(self._config, key)

    def __iter__(self) -> Iterator[str]:
        return iter(type(self._config).model_fields)

    def __len__(self) -> int:
        return len(type(self._config).model_fields)


def apply_transform(
    raw: Dataset,
    entry: Any,
    config: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    check: Check,
    features: Features,
    first_document: int,
    counts: RowCounts | None = None,
) -> Dataset:
    """The result of `check` for each row of the entry's transform, with `document`, the number of the raw row.

    `features` are the columns; numbers start at `first_document`. Rows with thinking that the chat template leaves out
    are added to `counts`. Raises DataError that names the transform and row.
    """
    transform_fn, map_kwargs = _build(entry, config)
    removed = map_kwargs.pop("remove_columns", [])
    removed = raw.column_names if removed == "__all__" else removed
    removed = {removed} if isinstance(removed, str) else set(removed)
    fields = [field for field in features if field != "document"]
    # As lists of Python's numbers, the tokens of 1,000 documents would take ten times the memory.
    packed = [field for field, kind in features.items() if kind == List(Value("int32"))]
    calls = (getattr(entry, "message_property_mappings", None) or {}).get("tool_calls")
    clean = without_added_keys(raw.features, getattr(entry, "field_tools", None), calls)
    name = named(entry)
    step = _Step(name, transform_fn, tokenizer, removed, check, fields, first_document, clean, packed)
    map_kwargs = {"num_proc": config.dataset_num_proc if config.dataset_num_proc > 1 else None, **map_kwargs}
    options = {
        "with_indices": True,
        "remove_columns": raw.column_names,
        "features": Features({**features, _NOTED: Value("string")}),
        "desc": f"Tokenising {entry.path}",
    }
    try:
        with state_kept(name):
            rows = map_rows(
                raw, step.batch if map_kwargs.get("batched") else step.row, name=name, **options, **map_kwargs
            )
    except TypeError as error:  # an argument that Dataset.map does not have, or that is set here
        raise DataError(f"{name}: invalid map_kwargs {', '.join(map_kwargs)}: {cause(error)}.") from error
    found = np.asarray(rows[_NOTED], dtype=object)
    for what in (LEFT_OUT, UNTHINKING) if counts is not None else ():
        documents = np.unique(np.asarray(rows["document"])[found == what])
        if len(documents):
            counts[what] += len(documents)
            counts.note(what, documents.tolist())
    return rows.remove_columns(_NOTED)


def row_function(
    entry: Any, config: DataSettings, tokenizer: PreTrainedTokenizerBase, check: Check
) -> Callable[[dict[str, Any], int], dict[str, Any]]:
    """The function that `apply_transform` calls for each row and its number, for transforms of single rows."""
    transform_fn, _ = _build(entry, config)
    return _Step(named(entry), transform_fn, tokenizer, set(), check, [], 0).row


def _build(entry: Any, config: Section) -> tuple[Callable, dict[str, Any]]:
    make = find_transform(entry.type)
    with user_code(f"transform {entry.type!r}, called with (cfg, dataset=...),", DataError, sets_up=True):
        built = make(ConfigView(config), dataset=entry)
    if not isinstance(built, tuple) or len(built) != 2 or not callable(built[0]) or not isinstance(built[1], dict):
        raise DataError(
            f"transform {entry.type!r} returned {type(built).__name__}; it must return (transform_fn, map_kwargs), "
            'for example `return transform_fn, {"remove_columns": "__all__"}`.'
        )
    return built[0], dict(built[1])


def named(entry: Any) -> str:
    """A source and its transform, for messages."""
    return f"{entry.path}, {entry.split}: transform {entry.type!r}"


class _Step:
    """One call of `Dataset.map`: applies the transform, adds the row to its errors, and checks its fields."""

    def __init__(
        self,
        name: str,
        transform_fn: Callable,
        tokenizer: PreTrainedTokenizerBase,
        removed: set[str],
        check: Check,
        fields: list[str],
        first_document: int,
        clean: Callable[[dict[str, Any]], dict[str, Any]] = dict,
        packed: Sequence[str] = (),
    ) -> None:
        self.name, self.transform_fn, self.tokenizer = name, transform_fn, tokenizer
        self.removed, self.check, self.fields, self.first_document = removed, check, fields, first_document
        self.clean, self.packed = clean, packed

    def row(self, example: dict[str, Any], index: int) -> dict[str, Any]:
        where = f"{self.name}, row {index}"
        checked = self.check(self._call(self.clean(dict(example)), where), where)
        for field in self.packed:
            checked[field] = np.asarray(checked[field], dtype=np.int32)
        return {
            **checked,
            "document": self.first_document + index,
            _NOTED: take_left_out(),
        }

    def batch(self, examples: dict[str, list], indices: list[int]) -> dict[str, list]:
        """For transforms with `batched: true`, which may return more or fewer rows than they receive."""
        where = f"{self.name}, rows {indices[0]}-{indices[-1]}"
        given = [self.clean(dict(zip(examples, values))) for values in zip(*examples.values())]
        result = self._call({name: [row[name] for row in given] for name in examples}, where)
        counts = {field: len(values) for field, values in result.items()}
        if len(set(counts.values())) > 1:
            raise DataError(f"{where}: the fields have different lengths: {counts}.")
        rows = [dict(zip(result, values)) for values in zip(*result.values())]
        noted = take_left_out()
        checked = []
        for number, row in enumerate(rows):
            checked.append(self.check(row, f"{where}, result {number}") | {_NOTED: take_left_out() or noted})
        # If the number of rows changed, the raw row of a result is unknown, and the batch counts as one document.
        documents = indices if len(rows) == len(indices) else [indices[0]] * len(rows)
        columns = {field: [row[field] for row in checked] for field in [*self.fields, _NOTED]}
        return {**columns, "document": [self.first_document + index for index in documents]}

    def _call(self, example: dict[str, Any], where: str) -> dict[str, Any]:
        try:
            with named_call(where, DataError, lambda what: f"{what}. The row has the columns {', '.join(example)}."):
                result = self.transform_fn(dict(example), tokenizer=self.tokenizer)
        except EBFTError as error:
            raise DataError(f"{where}: {error}") from error
        if not isinstance(result, Mapping):
            raise DataError(
                f"{where}: the transform returned {type(result).__name__}; it must return a dict of fields."
            )
        return {**{key: value for key, value in example.items() if key not in self.removed}, **result}
