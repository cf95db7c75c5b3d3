"""Loading rows for training and evaluation from the `datasets:` section of a config; here rows of tokens."""

import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from ebft.data.keys import DataSettings
from ebft.data.lengths import DROPPED, SPLIT, TRUNCATED, cut_and_drop
from ebft.data.sources import read_source
from ebft.data.tokenise import tokenise
from ebft.errors import DataError, shortened

# Returns the usable rows of a source, given its entry, its raw rows, the number of the first, and counts to update.
LoadEntry = Callable[[Any, Dataset, int, Counter], Dataset]


def load_datasets(config: DataSettings, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, Dataset | None]:
    """The training rows and the evaluation rows (None if the config holds no data out).

    Columns: `input_ids` and `labels` (lists of ints of the same length, at most `sequence_len`, unpadded; labels are
    -100 for tokens that are not trained on) and `prompt_length` (0 for text without a prompt). `val_set_size` holds out
    whole documents, so the windows of one document stay together. Raises DataError if a source cannot be read or no
    usable rows are left.
    """
    train, evaluation = load_sections(config, token_rows(config, tokenizer), hint(config))
    return train.remove_columns("document"), None if evaluation is None else evaluation.remove_columns("document")


def token_rows(config: DataSettings, tokenizer: PreTrainedTokenizerBase) -> LoadEntry:
    """Return a function that loads rows of at most `sequence_len` tokens from a source."""

    def load_entry(entry: Any, raw: Dataset, first_document: int, counts: Counter) -> Dataset:
        rows = tokenise(raw, entry, config, tokenizer, first_document)
        return cut_and_drop(rows, config.sequence_len, config.required_rows.block, counts)

    return load_entry


def load_sections(config: DataSettings, load_entry: LoadEntry, hint: str) -> tuple[Dataset, Dataset | None]:
    """The shuffled rows of `datasets`, and the evaluation rows: those of `test_datasets`, or held out of `datasets`.

    `load_entry` makes usable rows, with the column `document`, from one source; `hint` is the advice if none are left.
    """
    train, documents = _load_section(config.datasets, "datasets", load_entry, hint)
    evaluation = None
    if config.test_datasets:
        evaluation, _ = _load_section(config.test_datasets, "test_datasets", load_entry, hint)
    elif config.val_set_size:
        train, evaluation = _hold_out(train, documents, config)
    if config.shuffle_merged_datasets:
        seed = config.seed if config.data_seed is None else config.data_seed
        train = train.shuffle(seed=seed, load_from_cache_file=False)
    return train, evaluation


def load_held_out_section(config: DataSettings, load_entry: LoadEntry, hint: str) -> Dataset:
    """Only the evaluation rows, in the order of their documents: of `test_datasets`, or held out of `datasets`.

    Raises DataError if the config holds no data out.
    """
    if config.test_datasets:
        return _load_section(config.test_datasets, "test_datasets", load_entry, hint)[0]
    if not config.val_set_size:
        raise DataError("evaluation needs held-out data, but the config has none. Set test_datasets or val_set_size.")
    return _hold_out(*_load_section(config.datasets, "datasets", load_entry, hint), config)[1]


def _load_section(entries: list, section: str, load_entry: LoadEntry, hint: str) -> tuple[Dataset, int]:
    """The usable rows of all entries, and the number of documents, usable or not."""
    parts, counts, documents = [], Counter(), 0
    for entry in entries:
        raw = read_source(entry)
        parts.append(load_entry(entry, raw, documents, counts))
        documents += len(raw)
    joined = concatenate_datasets(parts)
    report = describe(section, documents, len(joined), counts)
    if not len(joined):
        sources = shortened(", ".join(entry.path for entry in entries))
        raise DataError(f"{sources}: {report}. No usable rows are left: {hint}")
    if os.environ.get("RANK", "0") == "0":
        print(report, file=sys.stderr)
    return joined, documents


def describe(section: str, documents: int, rows: int, counts: Counter) -> str:
    """One line about the documents and rows of a section, with a count for each reason."""
    notes = [f"{counts[what]:,} {what}" for what in (SPLIT, TRUNCATED) if counts[what]]
    dropped = [f"{counts[reason]:,} {reason}" for reason in DROPPED if counts[reason]]
    line = f"{section}: {_counted(documents, 'document')} produced {_counted(rows, 'row')}"
    if notes:
        line += f" ({', '.join(notes)})"
    return f"{line}; dropped {', '.join(dropped)}" if dropped else line


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def hint(config: DataSettings) -> str:
    block = config.required_rows.block
    if block is None:
        return "provide rows with text and a reference, or increase sequence_len."
    return (
        f"a block needs context_length: {block.context_length} (or the prompt plus min_completion_prefix: "
        f"{block.min_completion_prefix}) plus generate_max_len: {block.generate_max_len} tokens within sequence_len: "
        f"{config.sequence_len}. Decrease the first three, increase sequence_len, or use longer texts."
    )


def _hold_out(rows: Dataset, documents: int, config: DataSettings) -> tuple[Dataset, Dataset]:
    """Split by documents: `val_set_size` is a fraction of them if below 1, otherwise a number.

    They are selected among all documents, usable or not: methods that drop different ones hold out the same ones.
    """
    owner = np.asarray(rows["document"])
    size = config.val_set_size
    held = round(size * documents) if size < 1 else size
    is_held = np.isin(owner, np.random.default_rng(config.seed).permutation(documents)[:held])
    out, left = (len(np.unique(owner[part])) for part in (is_held, ~is_held))
    if not out or not left:
        raise DataError(
            f"val_set_size: {size} of {documents} documents holds out {held}, which leaves {left} usable documents for "
            f"training and {out} for evaluation; both need at least one. Change val_set_size, or use test_datasets."
        )
    return rows.select(np.flatnonzero(~is_held)), rows.select(np.flatnonzero(is_held))
