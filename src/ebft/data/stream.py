"""Rows of exactly `sequence_len` tokens from a stream of documents, each with the position after it.

The raw rows of the sources are read in blocks, which are what is in memory at once. The rows of a block are shuffled
among themselves, so that the position of a row is the position of its block in the sources, and its place in the block:
resuming reads one block again, and no more.

Documents are concatenated. A text that does not fit into the rest of a row continues in the next row, as a document of
its own, so that no token is left out and no row is padded. A document with a prompt begins the next row instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, repeat
from typing import Any, NamedTuple

import numpy as np
import torch.utils.data
from datasets import IterableDataset, load_dataset
from transformers import PreTrainedTokenizerBase

from ebft.config.keys.data import StreamSettings
from ebft.data import apply, file_formats, json_files, load, repositories, row_counts
from ebft.data import sources as raw
from ebft.data.transforms.rows import IGNORE
from ebft.errors import DataError, doing, warn

State = dict[str, Any]  # of JSON values


class Document(NamedTuple):
    """A raw row, with the number of its source and its number within the source."""

    source: int
    number: int
    row: dict[str, Any]


class Labelled(NamedTuple):
    """The tokens of a document with their labels; `is_whole` if they stay in one row, since a part of a chat lacks what
    its answer follows."""

    ids: list[int]
    labels: list[int]
    is_whole: bool = False


class StreamBlock(NamedTuple):
    """Rows that are in memory together, in the order of training; `start` is the position before them."""

    start: State
    documents: list[Document]
    ends_pass: bool  # whether the sources begin again after it


class StreamSource:
    """The rows of one dataset entry, in order; `name` is its name in messages."""

    def __init__(self, name: str, rows: IterableDataset, skip: int = 0) -> None:
        self.name, self._skip = name, skip
        self._rows = rows.skip(skip) if skip else rows
        self._beginning = copy.deepcopy(self._rows.state_dict())
        self.begin()

    def begin(self) -> None:
        """Continue with the first row."""
        self.restore({"read": 0, "rows": self._beginning})

    def state(self) -> State:
        """The position of the next row."""
        # datasets returns the former position until a row is read from the new one.
        rows = self._rows.state_dict() if self._is_moving else self._restored
        return {"read": self._read, "rows": copy.deepcopy(rows)}

    def restore(self, state: State) -> None:
        """Continue at a result of `state`."""
        rows, self._read = state["rows"], state["read"]
        is_known = _types(rows) <= _types(self._beginning)  # another release may have read the files in another way
        self._restored, self._is_moving = rows if is_known else self._beginning, False
        self._rows.load_state_dict(copy.deepcopy(self._restored))
        self._iterator: Iterator[dict[str, Any]] = iter(self._rows)
        if not is_known:
            self._is_moving = any(True for _ in islice(self._iterator, self._read))

    def next_row(self) -> tuple[int, dict[str, Any]] | None:
        """The next row and its number, or None at the end. Raises DataError if there is none at all."""
        self._is_moving = True
        with doing(f"reading {self.name} after row {self._skip + self._read}"):
            row = next(self._iterator, None)
        if row is None and not self._read:
            raise DataError(f"{self.name}: there are no rows{f' after skip: {self._skip}' if self._skip else ''}.")
        if row is None:
            return None
        self._read += 1
        return self._skip + self._read - 1, row


def _types(state: Any) -> set[str]:
    """The kinds of readers in a position of datasets."""
    if not isinstance(state, dict):
        return set()
    return {state.get("type", "")}.union(*map(_types, state.values()))


class StreamedDocuments:
    """The rows of all sources in blocks of `size` rows, shuffled with `seed`; None for the order of the sources.

    Without `weights`, the sources are read one after the other and then again from the first; a block ends with the
    last source, so that each row is read once before any is read again. With them, the next row is from the source
    that has given the fewest rows for its weight, so that every stretch of the stream has the same mixture; a source
    that ends begins again, and a pass ends with the block in which the last source has ended.
    """

    def __init__(
        self,
        sources: Callable[[], list[StreamSource]],
        size: int,
        seed: int | None,
        weights: Sequence[float] | None = None,
    ) -> None:
        self._open, self._size, self._seed, self._weights = sources, size, seed, weights

    def blocks(self, start: State | None = None) -> Iterator[StreamBlock]:
        """Blocks without end, from the first or from a block's `start` on."""
        sources, is_mixed = self._open(), self._weights is not None
        number, current, taken, ended = 0, 0, [0] * len(sources), set[int]()
        if start is not None and is_mixed:
            number, taken, ended = start["block"], list(start["taken"]), set(start["ended"])
            for source, state in zip(sources, start["sources"], strict=True):
                source.restore(state)
        elif start is not None:
            number, current, ended = start["block"], start["source"], set(range(start["source"]))
            sources[current].restore(start["rows"])
        while True:
            before: State = {"block": number, "source": current, "rows": sources[current].state()}
            if is_mixed:
                states = [source.state() for source in sources]
                before = {"block": number, "taken": list(taken), "ended": sorted(ended), "sources": states}
            found: list[Document] = []
            while len(found) < self._size and current < len(sources):
                if is_mixed:
                    current = min(range(len(sources)), key=lambda place: (taken[place] + 1) / self._weights[place])
                row = sources[current].next_row()
                if row is not None:
                    taken[current] += 1
                    found.append(Document(current, *row))
                    continue
                ended.add(current)
                if is_mixed:
                    sources[current].begin()
                else:
                    current += 1
            ends = len(ended) == len(sources)
            if self._seed is not None:
                order = np.random.default_rng([self._seed, number]).permutation(len(found))
                found = [found[place] for place in order]
            yield StreamBlock(before, found, ends)
            number += 1
            if ends:
                ended.clear()
            if ends and not is_mixed:
                current = 0
                for source in sources:
                    source.begin()


def open_source(entry: Any) -> IterableDataset:
    """The rows of `path`, which may be what `read_source` reads.

    Raises DataError that names the missing path or split.
    """
    if raw.is_url(entry.path):
        return _one(raw.remote_builders(entry), entry).as_streaming_dataset(split="train")
    path = raw.local_path(entry)
    if path is None:
        return raw.load_hub(entry, streaming=True)
    if raw.saved_to_disk(path) and not raw.names_a_format(entry):
        return _one(raw.saved_parts(path), entry).to_iterable_dataset()
    found = repositories.repository_of(path, entry)
    files = _one(raw.local_files(path, entry), entry) if found is None else found.of_split(entry.split)
    if found is not None and found.is_read_by_library:
        return found.builder.as_streaming_dataset(split=entry.split)
    kinds = sorted({kind for _, kind in files})
    if len(kinds) > 1:
        raise DataError(
            f"{entry.path}: a stream reads files of one format, but there are {', '.join(kinds)}. Use separate entries "
            "of datasets, or data_files."
        )
    paths = [path for path, _ in files]
    if kinds == ["text"]:  # with its line ends, as without a stream
        return IterableDataset.from_generator(file_formats.text_rows, gen_kwargs={"paths": paths})
    if kinds == ["json"]:
        for path in paths:
            next(json_files.json_rows(path))  # raises for a file that does not begin with a row
        return IterableDataset.from_generator(json_files.json_batches, gen_kwargs={"paths": list(map(str, paths))})
    with doing(f"reading {entry.path}"):
        return load_dataset(kinds[0], split="train", streaming=True, **file_formats.reader_arguments(kinds[0], paths))


def _one(parts: dict[str, Any], entry: Any) -> Any:
    """The split of the entry."""
    with doing(f"taking the split {entry.split!r} of {entry.path}, which has {', '.join(parts)}"):
        return parts[entry.split]


SKIPPED: dict[str, Any] = {}  # takes the place of a row that an earlier run has trained on
FEWEST = 2  # tokens of a document: one has nothing to predict


@dataclass(frozen=True)
class Position:
    """Where the row after `row` rows begins: at a token of the document at `place` in the block that starts at `block`.

    It is an object and not a dict, so that it remains one while batches are moved to a device.
    """

    row: int = 0
    block: State | None = None
    place: int = 0
    token: int = 0


class StreamRows(torch.utils.data.IterableDataset):
    """The rows of a stream: `input_ids`, `labels`, `seq_lengths` of the documents in it, and `position` after it.

    `encode` gives the tokens of a document, none for one that is left out. With `apart`, documents do not see each
    other: the first token of each has no label. Otherwise a row is one text, without `seq_lengths`, and only its first
    token has none.
    """

    def __init__(
        self, documents: StreamedDocuments, encode: Callable[[Document], Labelled], sequence_len: int, apart: bool
    ) -> None:
        self._documents, self._encode = documents, encode
        self._length, self._apart = sequence_len, apart
        self._position, self._skipped = Position(), 0

    def continue_from(self, position: Position, row: int, skipped: int) -> None:
        """Continue with the row of number `row`, which is at `position` or after it.

        `skipped` empty rows come first: the trainer counts, and drops, the rows of the steps before.
        """
        for passed in islice(self.rows(position), row - position.row):
            position = passed["position"]
        self._position = position
        self._skipped = skipped

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from repeat(SKIPPED, self._skipped)
        yield from self.rows(self._position)

    def rows(self, position: Position | None = None) -> Iterator[dict[str, Any]]:
        """Rows without end, from a position on."""
        position = position or Position()
        pieces: list[Labelled] = []
        room, count = self._length, position.row
        for at, tokens in self._texts(position):
            start = at.token
            while start < len(tokens.ids):
                if not (tokens.is_whole and room < len(tokens.ids)):
                    pieces.append(Labelled(tokens.ids[start : start + room], tokens.labels[start : start + room]))
                    start, room = start + len(pieces[-1].ids), room - len(pieces[-1].ids)
                    if room:
                        continue
                count += 1
                row: dict[str, Any] = {"input_ids": [token for piece in pieces for token in piece.ids]}
                row |= {"pieces": len(pieces), "position": replace(at, row=count, token=start)}
                row["labels"] = [IGNORE, *[label for piece in pieces for label in piece.labels][1:]]
                if self._apart:
                    row["labels"] = [label for piece in pieces for label in (IGNORE, *piece.labels[1:])]
                    row["seq_lengths"] = [len(piece.ids) for piece in pieces]
                yield row
                pieces, room = [], self._length

    def _texts(self, start: Position) -> Iterator[tuple[Position, Labelled]]:
        """The position and the tokens of each usable document, without end; the first may have been read in part."""
        place, found = start.place, start.block is not None
        for block in self._documents.blocks(start.block):
            for number in range(place, len(block.documents)):
                tokens = self._encode(block.documents[number])
                if len(tokens.ids) >= FEWEST:
                    found = True
                    yield Position(start.row, block.start, number, start.token), tokens
                start = replace(start, token=0)
            place = 0
            if block.ends_pass:
                if not found:
                    raise DataError(
                        "datasets: no document of the stream has text to train on. Check the columns (field, or "
                        "text_column of pretraining_dataset), and sequence_len."
                    )
                found = False


# Keys of a dataset that determine its documents. Files may have moved, so paths are not compared.
_SOURCE = ("name", "split", "revision", "field", "skip", "ds_type", "weight")


def load_stream(config: StreamSettings, tokenizer: PreTrainedTokenizerBase) -> load.LoadedRows:
    """The stream of `datasets`, and the rows of `test_datasets`, if any."""
    stream = stream_rows(config, tokenizer)
    if not config.test_datasets:
        return load.LoadedRows(stream, None, [])
    evaluation, found = load.load_test_datasets(config, tokenizer)
    return load.LoadedRows(stream, evaluation, [found])


def stream_rows(config: StreamSettings, tokenizer: PreTrainedTokenizerBase) -> StreamRows:
    """The stream of `datasets`; the first row of each source is read, so that errors come before a model is loaded."""
    encode = _Encoder(config, tokenizer)
    for number, source in enumerate(_sources(config.datasets)):
        encode(Document(number, *source.next_row()))
    open_all, size = partial(_sources, config.datasets), config.streaming_multipack_buffer_size
    weights = [entry.weight for entry in config.datasets]
    shares = [1.0 if weight is None else weight for weight in weights] if any(weights) else None
    documents = StreamedDocuments(open_all, size, order_of(config)["data_seed"], shares)
    return StreamRows(documents, encode, config.sequence_len, config.pretrain_multipack_attn)


def order_of(config: StreamSettings) -> dict[str, Any]:
    """The settings that the order of the documents depends on, by key, as JSON values."""
    entries = [entry.model_dump(include=set(_SOURCE), exclude_defaults=True) for entry in config.datasets]
    shuffles = config.shuffle_merged_datasets and not config.curriculum_sampling
    seed = config.seed if config.data_seed is None else config.data_seed
    return {
        "datasets": entries,
        "shuffle_merged_datasets": shuffles,
        "streaming_multipack_buffer_size": config.streaming_multipack_buffer_size,
        "data_seed": seed if shuffles else None,
    }


def _sources(entries: list[Any]) -> list[StreamSource]:
    return [StreamSource(f"{entry.path}, {entry.split}", open_source(entry), entry.skip) for entry in entries]


class _Encoder:
    """The tokens of documents, cut and left out as without a stream, with a warning for the first of each kind."""

    def __init__(self, config: StreamSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        self._functions = [apply.tokeniser(entry, config, tokenizer) for entry in config.datasets]
        self._entries, self._longest, self._told = config.datasets, config.sequence_len, set[str]()

    def __call__(self, document: Document) -> Labelled:
        entry, row = self._entries[document.source], self._functions[document.source](document.row, document.number)
        is_whole = entry.type not in ("completion", "completion.transform")
        end = self._longest if is_whole else None
        tokens = Labelled((row["input_ids"] or [])[:end], (row["labels"] or [])[:end], is_whole)
        reason = row["reason"]
        if not reason and is_whole and all(label == IGNORE for label in tokens.labels):
            is_cut = any(label != IGNORE for label in row["labels"])
            reason = row_counts.PROMPT_TOO_LONG if is_cut else row_counts.NO_REFERENCE
        note = f"left out: {reason}" if reason else "" if tokens.ids == row["input_ids"] else "cut to sequence_len"
        if note and note not in self._told:
            self._told.add(note)
            warn(f"{entry.path}: row {document.number}, and others, are {note}.")
        return Labelled([], []) if reason else tokens
