"""Loading rows for training and evaluation from the `datasets:` section of a config; here rows of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset, Features, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from ebft.config.keys.data import DataSettings
from ebft.data import row_counts
from ebft.data.apply import Check, Source, apply_transform, tokenise
from ebft.data.documents import cut_and_drop, without_repeated
from ebft.data.row_counts import RowCounts, SectionReport
from ebft.data.sources import RawRows, read_source, row_place
from ebft.data.tables import discard_tables, shuffle_rows
from ebft.errors import DataError, shortened, warn
from ebft.machine import is_main_process
from ebft.printed import say

LoadEntry = Callable[[Source, RowCounts], Dataset]  # returns the usable rows of a source, and updates counts


class LoadedRows(NamedTuple):
    """The training rows, the evaluation rows (None if the config holds no data out), and a report per section."""

    train: Dataset
    evaluation: Dataset | None
    reports: list[SectionReport]

    def map(self, function: Callable[[Dataset], Dataset]) -> LoadedRows:
        """The rows converted by a function of the rows of a section."""
        evaluation = None if self.evaluation is None else function(self.evaluation)
        return self._replace(train=function(self.train), evaluation=evaluation)

    def without(self, *columns: str) -> LoadedRows:
        return self.map(lambda rows: rows.remove_columns(columns))


def load_token_rows(config: DataSettings, tokenizer: PreTrainedTokenizerBase) -> LoadedRows:
    """The training rows and the evaluation rows (None if the config holds no data out).

    Columns: `input_ids` and `labels` (lists of ints of the same length, at most `sequence_len`, unpadded; labels are
    -100 for tokens that are not trained on), `prompt_length` (0 for text without a prompt) and `turn_spans` ((start,
    end) pairs of the trained turns; if empty, `prompt_length` to the end). `val_set_size` holds out whole documents, so
    the windows of one document stay together. Raises DataError if a source cannot be read or no usable rows are left.
    """
    return load_sections(config, token_rows(config, tokenizer)).without("document")


def load_test_datasets(config: DataSettings, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, SectionReport]:
    """The rows of tokens of `test_datasets` alone, in the order of their documents, and their report."""
    rows, report, _ = _load_section(config, "test_datasets", token_rows(config, tokenizer))
    return rows.remove_columns("document"), report


def load_dataset_of_tokens(rows: Dataset, config: DataSettings, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """The same rows of tokens of `rows`, which have the `type` of the config's only entry of `datasets`."""
    return _load_section(config, "datasets", token_rows(config, tokenizer), [rows])[0].remove_columns("document")


def token_rows(config: DataSettings, tokenizer: PreTrainedTokenizerBase) -> LoadEntry:
    """Return a function that loads rows of at most `sequence_len` tokens from a source."""

    def load_entry(source: Source, counts: RowCounts) -> Dataset:
        entry, raw, first_document, _ = source
        rows = tokenise(source, config, tokenizer, counts)
        kept = cut_and_drop(rows, config, tokenizer, counts)
        discard_tables(rows)
        if config.excess_length_strategy == "raise" and counts[row_counts.TOO_LONG]:
            row = counts.documents[row_counts.TOO_LONG][0] - first_document
            raise DataError(
                f"{row_place(raw[row], row, f'{entry.path}, {entry.split}')} exceeds sequence_len: "
                f"{config.sequence_len} tokens (excess_length_strategy: raise). Use drop or truncate, or increase it."
            )
        return kept

    return load_entry


def transformed_rows(
    config: DataSettings, tokenizer: PreTrainedTokenizerBase, check: Check, features: Features
) -> LoadEntry:
    """Return a function that loads the rows that `check` makes of the results of a source's transform."""
    return lambda source, counts: apply_transform(source, config, tokenizer, check, features, counts)


def load_sections(config: DataSettings, load_entry: LoadEntry) -> LoadedRows:
    """The shuffled rows of `datasets`, and the evaluation rows: all rows of `test_datasets`, or held out of `datasets`.

    Training rows appear as often as `weight` of their entry says; evaluation rows appear once.
    `load_entry` makes usable rows, with the column `document`, from one source.
    """
    train, of_train, documents = _load_section(config, "datasets", load_entry)
    evaluation, reports = None, [of_train]
    if config.test_datasets:
        evaluation, of_evaluation, _ = _load_section(config, "test_datasets", load_entry)
        reports.append(of_evaluation)
    elif config.val_set_size:
        train, evaluation = _hold_out(train, documents, config)
    train = weighted(train, config.datasets, documents.firsts, config.seed)
    if config.shuffle_merged_datasets and not config.curriculum_sampling:
        seed = config.seed if config.data_seed is None else config.data_seed
        train = shuffle_rows(train, seed)
    return LoadedRows(train, evaluation, reports)


def load_held_out_section(config: DataSettings, load_entry: LoadEntry) -> Dataset:
    """Only the evaluation rows, in the order of their documents: of `test_datasets`, or held out of `datasets`.

    Raises DataError if the config holds no data out.
    """
    if config.test_datasets:
        return _load_section(config, "test_datasets", load_entry)[0]
    if not config.val_set_size:
        raise DataError("evaluation needs held-out data, but the config has none. Set test_datasets or val_set_size.")
    rows, _, documents = _load_section(config, "datasets", load_entry)
    return _hold_out(rows, documents, config)[1]


def _load_section(
    config: DataSettings, section: str, load_entry: LoadEntry, raw: list[Dataset] | None = None
) -> tuple[Dataset, SectionReport, RawRows]:
    """The usable rows of all entries, with the column `document`, and the report of all documents, usable or not."""
    counts, entries = RowCounts(), getattr(config, section)
    raw = [read_source(entry) for entry in entries] if raw is None else raw
    documents = RawRows(entries, raw)
    is_split = section == "datasets" and config.val_set_size and not config.test_datasets
    held_out = documents.held_out(config.val_set_size, config.seed) if is_split else ()
    sources = [Source(*source, held_out) for source in zip(entries, raw, documents.firsts)]
    joined = concatenate_datasets([load_entry(source, counts) for source in sources])
    if config.dataset_exact_deduplication:
        joined = without_repeated(joined, counts)
    found = counts.report(section, joined["document"] if len(joined) else [], documents)
    if not len(joined):
        paths = shortened(", ".join(entry.path for entry in entries))
        raise DataError(f"{paths}: {found}. No usable rows are left: {_advice(config, counts)}")
    if is_main_process():
        say(found.with_example(), err=True)
        if (dropped := found.mostly_dropped()) is not None:
            warn(f"{section}: {dropped}: {_advice(config, counts)}")
    return joined, found, documents


def _advice(config: DataSettings, counts: RowCounts) -> str:
    """What to change if no rows are left, or few; `counts`: rows by reason."""
    length, block = f"sequence_len: {config.sequence_len}", config.required_rows.block
    too_long = (row_counts.PROMPT_TOO_LONG, row_counts.COMPLETION_TOO_LONG, row_counts.REPLY_TOO_LONG)
    is_cut = any(counts[reason] for reason in (*too_long, row_counts.TOO_LONG, row_counts.SPLIT))
    if block is None:
        fit = f"provide rows whose texts (a prompt with its reference or replies) fit within {length}, or increase it."
        return fit if is_cut else "correct the rows, or the keys of datasets."
    longer = "increase sequence_len" if is_cut else "use longer texts"
    return (
        f"a block needs context_length: {block.context_length} tokens (or the prompt and min_completion_prefix: "
        f"{block.min_completion_prefix}), followed by the end of the text or generate_max_len: "
        f"{block.generate_max_len} tokens, within {length}. Decrease the first three, or {longer}."
    )


def _hold_out(rows: Dataset, documents: RawRows, config: DataSettings) -> tuple[Dataset, Dataset]:
    """Split by documents: `val_set_size` is a fraction of all documents if below 1, otherwise a number."""
    owner = np.asarray(rows["document"])
    size, count = config.val_set_size, int(documents.with_text.sum())
    given = f"{count:,} documents{'' if count == len(documents) else ' with text'}"
    chosen = documents.held_out(size, config.seed)
    is_held = np.isin(owner, chosen)
    out, left = (len(np.unique(owner[part])) for part in (is_held, ~is_held))
    if not out or not left:
        raise DataError(
            f"val_set_size: {size} of {given} holds out {len(chosen)}, which leaves {left} usable documents for "
            f"training and {out} for evaluation; both need at least one. Change val_set_size, or use test_datasets."
        )
    return rows.select(np.flatnonzero(~is_held)), rows.select(np.flatnonzero(is_held))


def weighted(rows: Dataset, entries: Sequence[Any], firsts: Sequence[int], seed: int) -> Dataset:
    """The training rows, each as often as `weight` of its entry says; 1 where it is unset.

    Each entry has its rows the whole number of times and the rows of a random part of its documents once more, so that
    the windows of a document stay together. `rows` have the column `document`, and `firsts` are the first documents of
    the entries. The order is the order of the entries. Raises DataError if a weight leaves no row of an entry.
    """
    if all(entry.weight is None or entry.weight == 1 for entry in entries):
        return rows
    owner = np.asarray(rows["document"])
    entry_of = np.searchsorted(np.asarray(firsts), owner, side="right") - 1
    taken: list[np.ndarray] = []
    for number, entry in enumerate(entries):
        own = np.flatnonzero(entry_of == number)
        times, part = divmod(1.0 if entry.weight is None else entry.weight, 1)
        documents = np.unique(owner[own])
        once_more = np.random.default_rng((seed, number)).permutation(documents)[: round(part * len(documents))]
        found = np.concatenate([np.tile(own, int(times)), own[np.isin(owner[own], once_more)]])
        if len(own) and not len(found):
            count = len(documents)
            raise DataError(
                f"datasets.{number}.weight: {entry.weight} of {count:,} document{'s' * (count > 1)} of {entry.path} "
                "rounds to none. Raise it, or remove the dataset."
            )
        if len(found) != len(own) and is_main_process():
            say(f"datasets.{number}.weight: {entry.weight}: {len(own):,} -> {len(found):,} rows", err=True)
        taken.append(found)
    return rows.select(np.concatenate(taken))
