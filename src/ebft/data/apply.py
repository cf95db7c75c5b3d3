"""Applying a transform to raw rows, with error messages that name the transform and the row."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from ebft.config.keys.data import DataSettings
from ebft.config.section import Section
from ebft.config.user_functions import user_code
from ebft.data import json_files, row_counts, sources, tables
from ebft.data.transforms import TRANSFORMS, PreferenceColumns, built_in, find_transform, wanted_rows
from ebft.data.transforms.rows import IGNORE
from ebft.errors import ConfigError, DataError, EBFTError, doing, prefixed, shortened, told
from ebft.machine import is_main_process
from ebft.printed import say

_NOTED = "lost"  # column of what a row loses: one of `row_counts.LOST`
_READ = "columns_read"  # column of the names of the columns that were read
# Converts a transformed row to columns; `reason` says why the row is dropped, empty if it is kept. A DataError
# that it raises is reported with the transform and the row.
Check = Callable[[Mapping[str, Any]], dict[str, Any]]


class ConfigView(dict):
    """The config that transforms are called with: keys are attributes and, as in other trainers, items of a mapping.

    Transforms may read any key of a run, so the config is passed on as it was given; unknown keys are absent.
    """

    def __init__(self, config: Section) -> None:
        super().__init__(config)
        self._config = config

    def __getattr__(self, key: str) -> Any:
        return getattr(vars(self).get("_config"), key)  # it has none before it is unpickled in another process


class Source(NamedTuple):
    """A dataset entry and its raw rows: the number of the first as a document, and the documents that are held out."""

    entry: Any
    raw: Dataset | None  # None for a stream
    first_document: int = 0
    held_out: Collection[int] = ()


def apply_transform(
    source: Source,
    config: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    check: Check,
    features: Features,
    counts: row_counts.RowCounts,
) -> Dataset:
    """The result of `check` for each row of the entry's transform, with `document`, the number of the raw row.

    `features` are the columns. Rows whose `reason` is one of `DROPPED` are left out. They, and rows with thinking that
    the chat template leaves out, are added to `counts`. Raises DataError that names the transform and row.
    """
    entry, raw, *_ = source
    step = _Step(source, config, tokenizer, check, features)
    num_proc = config.dataset_num_proc if config.dataset_num_proc > 1 else None
    map_kwargs = {"num_proc": num_proc, **step.map_kwargs}
    function = step.batch if map_kwargs.get("batched") else step.row
    if step.is_many:
        function, map_kwargs = step.rows, {**map_kwargs, "batched": True, "batch_size": 1}
    options = {
        "with_indices": True,
        "remove_columns": raw.column_names,
        "features": Features({**features, **WITH_REASON, _NOTED: Value("string"), _READ: Value("string")}),
        "desc": f"Tokenising {entry.path}",
    }
    with doing(f"applying {step.name}, with map_kwargs {', '.join(map_kwargs)}"):
        rows = tables.map_rows(raw, function, name=step.name, **options, **map_kwargs)
    found, documents = np.asarray(rows[_NOTED], dtype=object), np.asarray(rows["document"])
    for what in row_counts.LOST:
        if (found == what).any():
            counts.add(what, np.unique(documents[found == what]).tolist())
    if not step.is_own and is_main_process():
        read = {name for names in rows.unique(_READ) for name in json.loads(names)}
        unread = [column for column in raw.column_names if column not in {*read, "file"}]
        if unread:
            say(f"{entry.path}, {entry.split}: columns that are not read: {shortened(', '.join(unread))}", err=True)
    rows = rows.remove_columns([_NOTED, _READ])
    reasons = np.asarray(rows["reason"])
    for reason in (*row_counts.DROPPED, row_counts.TRUNCATED):
        counts.add(reason, documents[reasons == reason].tolist())
    return rows.select(np.flatnonzero(~np.isin(reasons, row_counts.DROPPED))).remove_columns("reason")


class _Step:
    """One call of `Dataset.map`: applies the transform, adds the row to its errors, and checks its fields."""

    def __init__(
        self, source: Source, config: DataSettings, tokenizer: PreTrainedTokenizerBase, check: Check, features: Features
    ) -> None:
        entry, raw, self.first_document, self.held_out = source
        self.name = f"{entry.path}, {entry.split}: transform {entry.type!r}"
        self.tokenizer, self.check = tokenizer, check
        with user_code(f"transform {entry.type!r}, called with (cfg, dataset=...),", DataError):
            self.transform_fn, map_kwargs = find_transform(entry.type)(ConfigView(config), dataset=entry)
        self.map_kwargs = dict(map_kwargs)
        self.is_many = self.map_kwargs.pop("many", False)
        removed = self.map_kwargs.pop("remove_columns", [])
        removed = (raw.column_names if raw is not None else ()) if removed == "__all__" else removed
        self.removed = {removed} if isinstance(removed, str) else set(removed)
        self.fields = [field for field in {**features, **WITH_REASON} if field != "document"]
        self.packed = [field for field, kind in features.items() if kind == IDS and raw is not None]
        unknown, *others = (getattr(tokenizer, f"{name}_token_id") for name in ("unk", "bos", "eos", "pad"))
        self.unknown = -1 if unknown is None or unknown in others else unknown
        calls = (getattr(entry, "message_property_mappings", None) or {}).get("tool_calls")
        tools = getattr(entry, "field_tools", None)
        self.clean = dict if raw is None else json_files.without_added_keys(raw.features, tools, calls)
        name = built_in(entry.type)
        self.is_own, self.system = name is None, None  # the column of a system message that must be read
        places_system = name is None or TRANSFORMS[name].format in ("text", "nemo_gym")
        places_system = places_system or bool(entry.user_defined and entry.user_defined.system_format)
        if not (places_system or entry.drop_system_message or entry.field_system):
            self.system = entry.type.field_system if isinstance(entry.type, PreferenceColumns) else "system"

    def rows(self, examples: dict[str, list], indices: list[int]) -> dict[str, list]:
        """For built-in transforms that return several rows of a row."""
        (example,) = (dict(zip(examples, values)) for values in zip(*examples.values()))
        found = self._of(example, indices[0])
        return {field: [row[field] for row in found] for field in [*self.fields, _NOTED, _READ, "document"]}

    def row(self, example: dict[str, Any], index: int) -> dict[str, Any]:
        (found,) = self._of(example, index)
        return found

    def _of(self, example: dict[str, Any], index: int) -> list[dict[str, Any]]:
        where = f"{self.name}, {sources.file_of(example) or f'row {index}'}"
        columns = row_counts.Columns(self.clean(dict(example)))
        with prefixed(where):
            try:
                results = self._call(columns)
                if not self.is_own:
                    row_counts.check_unread(columns, self.system)
                found = list(map(self._checked, results if isinstance(results, list) else [results]))
            except row_counts.Dropped as dropped:
                found = [{**dict.fromkeys(self.fields), "reason": str(dropped)}]
            except EBFTError:
                raise
            except Exception as error:  # some lose their notes on the way from another process
                raise DataError(told(error)) from error
        noted, read = row_counts.take_lost(), json.dumps(sorted(columns.read))
        return [row | {"document": self.first_document + index, _NOTED: noted, _READ: read} for row in found]

    def batch(self, examples: dict[str, list], indices: list[int]) -> dict[str, list]:
        """For transforms with `batched: true`, which may return more or fewer rows than they receive.

        Documents that are held out are given to the transform apart from the others.
        """
        given = [self.clean(dict(zip(examples, values))) for values in zip(*examples.values())]
        is_held = np.isin(self.first_document + np.asarray(indices), self.held_out)
        parts = [np.flatnonzero(is_held == side).tolist() for side in (False, True)]
        rows = []
        for part in filter(None, parts):
            rows += self._part([given[place] for place in part], [indices[place] for place in part])
        return {field: [row[field] for row in rows] for field in [*self.fields, _NOTED, _READ, "document"]}

    def _part(self, given: list[dict[str, Any]], indices: list[int]) -> list[dict[str, Any]]:
        where = f"{self.name}, rows {indices[0]}-{indices[-1]}"
        with doing(where), prefixed(where):
            result = self._call({name: [row[name] for row in given] for name in given[0]})
            rows = [dict(zip(result, values)) for values in zip(*result.values(), strict=True)]
        noted = row_counts.take_lost()
        # If the number of rows changed, the raw row of a result is unknown, and all count as one document.
        documents = indices if len(rows) == len(indices) else [indices[0]] * len(rows)
        checked = []
        for number, (row, document) in enumerate(zip(rows, documents)):
            with doing(each := f"{where}, result {number}"), prefixed(each):
                fields = self._checked(row)
            notes = {_NOTED: row_counts.take_lost() or noted, _READ: "[]"}
            checked.append(fields | notes | {"document": self.first_document + document})
        return checked

    def _checked(self, row: dict[str, Any]) -> dict[str, Any]:
        try:
            checked = {"reason": "", **self.check(row)}
        except row_counts.Dropped as dropped:
            checked = {**dict.fromkeys(self.fields), "reason": str(dropped)}
        # As lists of Python's numbers, the tokens of 1,000 documents would take ten times the memory.
        ids = {field: np.asarray(checked[field], dtype=np.int32) for field in self.packed if checked[field] is not None}
        if any(self.unknown in values for values in ids.values()):
            row_counts.note_lost(row_counts.UNKNOWN)
        return checked | ids

    def _call(self, example: dict[str, Any]) -> Any:
        """The fields of a row; of a built-in transform, of several rows."""
        if not self.is_own:
            return self.transform_fn(example, tokenizer=self.tokenizer)
        with user_code("", DataError, lambda what: f"{what}. The row has the columns {', '.join(example)}."):
            result = self.transform_fn(dict(example), tokenizer=self.tokenizer)
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
    source: Source, config: DataSettings, tokenizer: PreTrainedTokenizerBase, counts: row_counts.RowCounts | None = None
) -> Dataset:
    """Rows of `input_ids`, `labels`, `prompt_length`, `turn_spans` and `document`, the number of the raw row.

    Padding at the end of a row is removed; rows that are left out are added to `counts`. Raises DataError that names
    the transform, the row and the field.
    """
    check = partial(_checked, hint=wanted_rows(config.required_rows), vocabulary=len(tokenizer))
    counts = row_counts.RowCounts() if counts is None else counts
    return apply_transform(source, config, tokenizer, check, FEATURES, counts)


def tokeniser(
    entry: Any, config: DataSettings, tokenizer: PreTrainedTokenizerBase
) -> Callable[[dict[str, Any], int], dict[str, Any]]:
    """Return the function that `tokenise` calls for each raw row and its number. Raises ConfigError for a transform
    that does not give one row for each."""
    check = partial(_checked, hint=wanted_rows(config.required_rows), vocabulary=len(tokenizer))
    step = _Step(Source(entry, None), config, tokenizer, check, FEATURES)
    if step.is_many or step.map_kwargs.get("batched"):
        raise ConfigError(f"type: {entry.type} may give several rows for one, which streaming does not support.")
    return step.row


def _checked(row: Mapping[str, Any], hint: str, vocabulary: int) -> dict[str, Any]:
    """The fields of one row, without padding; a row whose `prompt_length` is None has no prompt and is dropped."""
    check_fields(row, ("input_ids", "labels"), hint)
    ids, labels = plain(row["input_ids"]), plain(row["labels"])
    mask = plain(row["attention_mask"]) if "attention_mask" in row else [1] * len(ids)
    length = sum(mask)
    if len(labels) != len(ids) or mask != [1] * length + [0] * (len(ids) - length):
        raise DataError(
            f"labels has {len(labels)} entries, but input_ids has {len(ids)}; attention_mask must be ones followed by "
            "zeros, with the same length. Do not pad on the left; rows do not need padding."
        )
    known = range(vocabulary)  # Arrow would round 1.5 in silence
    outside = [token for token in (*ids, *labels) if token not in known and token != IGNORE]
    outside += [IGNORE] * (IGNORE in ids)
    if outside:
        raise DataError(
            f"the row contains {outside[0]}, but the tokenizer's vocabulary has {vocabulary} tokens. Use the tokenizer "
            f"that the transform receives, and {IGNORE} for ignored labels only."
        )
    prompt_length = row.get("prompt_length", next((n for n, label in enumerate(labels) if label != IGNORE), 0))
    if prompt_length is None:
        raise row_counts.Dropped(row_counts.NO_PROMPT)
    spans = plain(row.get("turn_spans")) or []
    places = [0, *itertools.chain(*spans), length]
    if not 0 <= prompt_length <= length or places != sorted(places):
        raise DataError(f"prompt_length {prompt_length} and turn_spans {spans} must be in order within {length} tokens")
    return {"input_ids": ids[:length], "labels": labels[:length], "prompt_length": prompt_length, "turn_spans": spans}


def check_fields(row: Mapping[str, Any], names: Iterable[str], hint: str) -> None:
    """Raise DataError that says what a run trains on (`hint`) if a transform did not return one of these fields."""
    missing = [name for name in names if name not in row]
    if missing:
        raise DataError(f"the field {missing[0]!r} is missing; the transform returned {', '.join(row)}, but {hint}")


def plain(values: Any) -> Any:
    """Arrays and tensors as lists."""
    return values.tolist() if hasattr(values, "tolist") else values
