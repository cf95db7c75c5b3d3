"""Applying a transform to raw rows, with error messages that name the transform and the row."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from ebft.config.keys.data import DataSettings
from ebft.config.section import Section
from ebft.config.user_code import user_code
from ebft.data.columns import Columns, check_unread
from ebft.data.json_files import without_added_keys
from ebft.data.row_counts import DROPPED, LEFT_OUT, NO_PROMPT, TRUNCATED, UNTHINKING, Dropped, RowCounts, take_left_out
from ebft.data.sources import file_of
from ebft.data.tables import map_rows
from ebft.data.transforms import TRANSFORMS, PreferenceColumns, built_in, find_transform, wanted_rows
from ebft.data.transforms.rows import IGNORE
from ebft.errors import DataError, EBFTError, cause, shortened, told
from ebft.printed import say
from ebft.processes import is_main_process

_NOTED = "left_out"  # column of rows with thinking that the chat template leaves out
_READ = "columns_read"  # column of the names of the columns that were read
# Converts a transformed row to columns, of which `reason` says why the row is dropped, empty if it is kept. A DataError
# that it raises is reported with the transform and the row.
Check = Callable[[Mapping[str, Any]], dict[str, Any]]


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


class Source(NamedTuple):
    """A dataset entry and its raw rows: the number of the first as a document, and the numbers of those held out."""

    entry: Any
    raw: Dataset
    first_document: int = 0
    held_out: Collection[int] = ()


def apply_transform(
    source: Source,
    config: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    check: Check,
    features: Features,
    counts: RowCounts,
) -> Dataset:
    """The result of `check` for each row of the entry's transform, with `document`, the number of the raw row.

    `features` are the columns. Rows whose `reason` is one of `DROPPED` are left out. They, and rows with thinking that
    the chat template leaves out, are added to `counts`. Raises DataError that names the transform and row.
    """
    entry, raw, first_document, held_out = source
    transform_fn, map_kwargs = _build(entry, config)
    is_own, is_many = built_in(entry.type) is None, map_kwargs.pop("many", False)
    removed = map_kwargs.pop("remove_columns", [])
    removed = raw.column_names if removed == "__all__" else removed
    removed = {removed} if isinstance(removed, str) else set(removed)
    features = Features({**features, **WITH_REASON})
    fields = [field for field in features if field != "document"]
    packed = [field for field, kind in features.items() if kind == IDS]
    calls = (getattr(entry, "message_property_mappings", None) or {}).get("tool_calls")
    clean = without_added_keys(raw.features, getattr(entry, "field_tools", None), calls)
    name = named(entry)
    system = None if is_own else _system_column(entry)
    step = _Step(
        name, transform_fn, tokenizer, check, first_document, removed, fields, clean, packed, held_out, is_own, system
    )
    map_kwargs = {"num_proc": config.dataset_num_proc if config.dataset_num_proc > 1 else None, **map_kwargs}
    function = step.batch if map_kwargs.get("batched") else step.row
    if is_many:
        function, map_kwargs = step.rows, {**map_kwargs, "batched": True, "batch_size": 1}
    options = {
        "with_indices": True,
        "remove_columns": raw.column_names,
        "features": Features({**features, _NOTED: Value("string"), _READ: Value("string")}),
        "desc": f"Tokenising {entry.path}",
    }
    try:
        rows = map_rows(raw, function, name=name, **options, **map_kwargs)
    except TypeError as error:  # an argument that Dataset.map does not have, or that is set here
        raise DataError(f"{name}: invalid map_kwargs {', '.join(map_kwargs)}: {cause(error)}.") from error
    found, documents = np.asarray(rows[_NOTED], dtype=object), np.asarray(rows["document"])
    for what in (LEFT_OUT, UNTHINKING):
        if (found == what).any():
            counts.add(what, np.unique(documents[found == what]).tolist())
    if not is_own and is_main_process():
        read = {name for names in rows.unique(_READ) for name in json.loads(names)}
        unread = [column for column in raw.column_names if column not in {*read, "file"}]
        if unread:
            say(f"{entry.path}, {entry.split}: columns that are not read: {shortened(', '.join(unread))}", err=True)
    rows = rows.remove_columns([_NOTED, _READ])
    reasons = np.asarray(rows["reason"])
    for reason in (*DROPPED, TRUNCATED):
        counts.add(reason, documents[reasons == reason].tolist())
    return rows.select(np.flatnonzero(~np.isin(reasons, DROPPED))).remove_columns("reason")


def _system_column(entry: Any) -> str | None:
    """The column of a system message that must be read; None for raw text, and if the entry says what becomes of it."""
    if TRANSFORMS[built_in(entry.type)].format in ("text", "nemo_gym") or entry.drop_system_message:
        return None
    of_type = entry.type.field_system if isinstance(entry.type, PreferenceColumns) else "system"
    return of_type if entry.field_system is None and entry.user_defined is None else None


def _build(entry: Any, config: Section) -> tuple[Callable, dict[str, Any]]:
    make = find_transform(entry.type)
    with user_code(f"transform {entry.type!r}, called with (cfg, dataset=...),", DataError):
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


@dataclass
class _Step:
    """One call of `Dataset.map`: applies the transform, adds the row to its errors, and checks its fields."""

    name: str
    transform_fn: Callable
    tokenizer: PreTrainedTokenizerBase
    check: Check
    first_document: int = 0
    removed: Collection[str] = ()
    fields: Sequence[str] = ()
    clean: Callable[[dict[str, Any]], dict[str, Any]] = dict
    packed: Sequence[str] = ()
    held_out: Collection[int] = ()
    is_own: bool = True  # whether the transform is not a built-in one
    system: str | None = None  # a column that a built-in one has to read

    def rows(self, examples: dict[str, list], indices: list[int]) -> dict[str, list]:
        """For built-in transforms that return several rows of a row."""
        (example,) = (dict(zip(examples, values)) for values in zip(*examples.values()))
        found = self._of(example, indices[0])
        return {field: [row[field] for row in found] for field in [*self.fields, _NOTED, _READ, "document"]}

    def row(self, example: dict[str, Any], index: int) -> dict[str, Any]:
        (found,) = self._of(example, index)
        return found

    def _of(self, example: dict[str, Any], index: int) -> list[dict[str, Any]]:
        where = f"{self.name}, {file_of(example) or f'row {index}'}"
        columns = Columns(self.clean(dict(example)))
        try:
            results = self._call(columns, where)
            if not self.is_own:
                check_unread(columns, self.system)
            results = results if isinstance(results, list) else [results]
            found = [self._checked(result, where) for result in results]
        except Dropped as dropped:
            found = [self._dropped(dropped)]
        except DataError as error:
            raise error if str(error).startswith(where) else DataError(f"{where}: {error}") from error
        noted, read = take_left_out(), json.dumps(sorted(columns.read))
        return [row | {"document": self.first_document + index, _NOTED: noted, _READ: read} for row in found]

    def _dropped(self, dropped: Dropped) -> dict[str, Any]:
        return {**dict.fromkeys(self.fields), "reason": str(dropped)}

    def batch(self, examples: dict[str, list], indices: list[int]) -> dict[str, list]:
        """For transforms with `batched: true`, which may return more or fewer rows than they receive.

        Documents that are held out are given to the transform apart from the others.
        """
        given = [self.clean(dict(zip(examples, values))) for values in zip(*examples.values())]
        is_held = np.isin(self.first_document + np.asarray(indices), self.held_out)
        parts = [np.flatnonzero(is_held == side).tolist() for side in (False, True)]
        found = [
            self._part([given[place] for place in part], [indices[place] for place in part]) for part in parts if part
        ]
        rows = [row for part in found for row in part]
        return {field: [row[field] for row in rows] for field in [*self.fields, _NOTED, _READ, "document"]}

    def _part(self, given: list[dict[str, Any]], indices: list[int]) -> list[dict[str, Any]]:
        where = f"{self.name}, rows {indices[0]}-{indices[-1]}"
        result = self._call({name: [row[name] for row in given] for name in given[0]}, where)
        counts = {field: len(values) for field, values in result.items()}
        if len(set(counts.values())) > 1:
            raise DataError(f"{where}: the fields have different lengths: {counts}.")
        rows = [dict(zip(result, values)) for values in zip(*result.values())]
        noted = take_left_out()
        # If the number of rows changed, the raw row of a result is unknown, and all count as one document.
        documents = indices if len(rows) == len(indices) else [indices[0]] * len(rows)
        checked = []
        for number, (row, document) in enumerate(zip(rows, documents)):
            fields = self._checked(row, f"{where}, result {number}")
            notes = {_NOTED: take_left_out() or noted, _READ: "[]"}
            checked.append(fields | notes | {"document": self.first_document + document})
        return checked

    def _checked(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        try:
            checked = {"reason": "", **self.check(row)}
        except Dropped as dropped:
            checked = self._dropped(dropped)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        # As lists of Python's numbers, the tokens of 1,000 documents would take ten times the memory.
        ids = {field: np.asarray(checked[field], dtype=np.int32) for field in self.packed if checked[field] is not None}
        return checked | ids

    def _call(self, example: dict[str, Any], where: str) -> Any:
        """The fields of a row; of a built-in transform, of several rows."""
        try:
            if not self.is_own:
                return self.transform_fn(example, tokenizer=self.tokenizer)
            with user_code(where, DataError, lambda what: f"{what}. The row has the columns {', '.join(example)}."):
                result = self.transform_fn(dict(example), tokenizer=self.tokenizer)
        except Dropped:
            raise
        except EBFTError as error:
            raise DataError(f"{where}: {error}") from error
        except Exception as error:
            raise DataError(f"{where}: {told(error)}") from error
        if not isinstance(result, Mapping):
            raise DataError(
                f"{where}: the transform returned {type(result).__name__}; it must return a dict of fields."
            )
        return {**{key: value for key, value in example.items() if key not in self.removed}, **result}


IDS = List(Value("int32"))
WITH_REASON = {"reason": Value("string"), "document": Value("int64")}  # the columns of rows that a check can drop
FEATURES = Features(
    {
        "input_ids": IDS,
        "labels": IDS,
        "prompt_length": Value("int32"),
        "turn_spans": List(IDS),
        "document": Value("int64"),
    }
)


def tokenise(
    source: Source, config: DataSettings, tokenizer: PreTrainedTokenizerBase, counts: RowCounts | None = None
) -> Dataset:
    """Rows of `input_ids`, `labels`, `prompt_length`, `turn_spans` and `document`, the number of the raw row.

    Padding at the end of a row is removed; rows that are left out are added to `counts`. Raises DataError that names
    the transform, the row and the field.
    """
    check, counts = _check(config, tokenizer), RowCounts() if counts is None else counts
    return apply_transform(source, config, tokenizer, check, FEATURES, counts)


def tokeniser(
    entry: Any, config: DataSettings, tokenizer: PreTrainedTokenizerBase
) -> Callable[[dict[str, Any], int], dict[str, Any]]:
    """Return the function that `tokenise` calls for each raw row and its number, for transforms of single rows."""
    is_own = built_in(entry.type) is None
    system, fields = None if is_own else _system_column(entry), [name for name in FEATURES if name != "document"]
    check = _check(config, tokenizer)
    return _Step(
        named(entry), _build(entry, config)[0], tokenizer, check, fields=fields, is_own=is_own, system=system
    ).row


def _check(config: DataSettings, tokenizer: PreTrainedTokenizerBase) -> Check:
    return partial(_checked, hint=wanted_rows(config.required_rows), vocabulary=len(tokenizer))


def _checked(row: Mapping[str, Any], hint: str, vocabulary: int) -> dict[str, Any]:
    """The fields of one row, without padding; a row whose `prompt_length` is None has no prompt and is dropped.

    Raises DataError that names a missing or malformed field.
    """
    for field in ("input_ids", "labels"):
        if field not in row:
            raise DataError(f"the field {field!r} is missing; the transform returned {', '.join(row)}, but {hint}")
    ids, labels = (integers(row[field], field) for field in ("input_ids", "labels"))
    mask = integers(row["attention_mask"], "attention_mask") if "attention_mask" in row else [1] * len(ids)
    length = sum(mask)
    if len(labels) != len(ids) or mask != [1] * length + [0] * (len(ids) - length):
        raise DataError(
            f"labels has {len(labels)} entries, but input_ids has {len(ids)}; attention_mask must be ones followed by "
            "zeros, with the same length. Do not pad on the left; rows do not need padding."
        )
    outside = next((token for token in (*ids, *labels) if not 0 <= token < vocabulary and token != IGNORE), None)
    outside = IGNORE if outside is None and IGNORE in ids else outside
    if outside is not None:
        raise DataError(
            f"the row contains {outside}, but the tokenizer's vocabulary has {vocabulary} tokens. Use the tokenizer "
            f"that the transform receives, and {IGNORE} for ignored labels only."
        )
    prompt_length = row.get("prompt_length", next((n for n, label in enumerate(labels) if label != IGNORE), 0))
    if prompt_length is None:
        raise Dropped(NO_PROMPT)
    if type(prompt_length) is not int or not 0 <= prompt_length <= length:
        raise DataError(
            f"prompt_length must be a number of tokens before the reference, at most the row's {length}, got "
            f"{prompt_length!r}."
        )
    spans = _turn_spans(row.get("turn_spans"), length)
    return {"input_ids": ids[:length], "labels": labels[:length], "prompt_length": prompt_length, "turn_spans": spans}


def _turn_spans(values: Any, length: int) -> list[list[int]]:
    """The (start, end) pairs of a row of `length` tokens. Raises DataError unless they are in order and within it."""
    values = values.tolist() if hasattr(values, "tolist") else values or []
    is_right = isinstance(values, list) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in values)
    places = [place for pair in values for place in pair] if is_right else []
    is_right = is_right and set(map(type, places)) <= {int} and all(start < stop for start, stop in values)
    if not is_right or [0, *places, length] != sorted([0, *places, length]):
        raise DataError(
            f"turn_spans must be (start, end) pairs of positions within the row's {length} tokens, in order and "
            f"without overlaps, got {str(values)[:60]}."
        )
    return [list(pair) for pair in values]


def integers(values: Any, field: str) -> list[int]:
    """The numbers of a field of a row. Raises DataError if it has something else."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        raise DataError(f"{field} must be a list of token ids, got {str(values)[:60]}.")
    return values
