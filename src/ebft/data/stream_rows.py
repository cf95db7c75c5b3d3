"""Rows of exactly `sequence_len` tokens from a stream of documents, each with the position after it.

Documents are concatenated. One that does not fit into the rest of a row continues in the next row, as a document of its
own, so that no token is left out and no row is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice, repeat
from typing import Any

from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

from ebft.data.apply import tokeniser
from ebft.data.load import LoadedRows, load_section_of_tokens
from ebft.data.stream_documents import Document, Documents, MixedDocuments, Source, State, open_source, problem
from ebft.data.stream_keys import StreamSettings
from ebft.data.transforms.rows import IGNORE
from ebft.errors import DataError

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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class StreamRows(IterableDataset):
    """The rows of a stream: `input_ids`, `labels`, `seq_lengths` of the documents in it, and `position` after it.

    `encode` gives the tokens of a document. With `apart`, documents do not see each other: the first token of each has
    no label. Otherwise a row is one text, without `seq_lengths`, and only its first token has none.
    """

    def __init__(
        self, documents: Documents, encode: Callable[[Document], list[int]], sequence_len: int, apart: bool
    ) -> None:
        self._documents, self._encode = documents, encode
        self._length, self._apart = sequence_len, apart
        self._position, self._skipped = Position(), 0

    def continue_from(self, position: Position, row: int, skipped: int) -> None:
        """Continue with the row of number `row`, which is at `position` or after it.

        `skipped` empty rows come first: the trainer counts, and drops, the rows of the steps before.
        """
        self._position = self._at(position, row)
        self._skipped = skipped

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from repeat(SKIPPED, self._skipped)
        yield from self.rows(self._position)

    def _at(self, position: Position, row: int) -> Position:
        for passed in islice(self.rows(position), row - position.row):
            position = passed["position"]
        return position

    def rows(self, position: Position | None = None) -> Iterator[dict[str, Any]]:
        """Rows without end, from a position on."""
        position = position or Position()
        pieces: list[list[int]] = []
        room, count = self._length, position.row
        for at, tokens in self._texts(position):
            start = at.token
            while start < len(tokens):
                pieces.append(tokens[start : start + room])
                start, room = start + len(pieces[-1]), room - len(pieces[-1])
                if not room:
                    count += 1
                    yield self._row(pieces, replace(at, row=count, token=start))
                    pieces, room = [], self._length

    def _row(self, pieces: list[list[int]], position: Position) -> dict[str, Any]:
        ids = [token for piece in pieces for token in piece]
        if not self._apart:
            return {"input_ids": ids, "labels": [IGNORE, *ids[1:]], "position": position, "pieces": len(pieces)}
        labels = [label for piece in pieces for label in (IGNORE, *piece[1:])]
        lengths = [len(piece) for piece in pieces]
        return {"input_ids": ids, "labels": labels, "seq_lengths": lengths, "position": position, "pieces": len(pieces)}

    def _texts(self, start: Position) -> Iterator[tuple[Position, list[int]]]:
        """The position and the tokens of each usable document, without end; the first may have been read in part."""
        place, found = start.place, start.block is not None
        for block in self._documents.blocks(start.block):
            for number in range(place, len(block.documents)):
                tokens = self._encode(block.documents[number])
                if len(tokens) >= FEWEST:
                    found = True
                    yield Position(start.row, block.start, number, start.token), tokens
                start = replace(start, token=0)
            place = 0
            if block.ends_pass:
                if not found:
                    raise DataError(
                        "datasets: no document of the stream has text to train on. Check the column (field, or "
                        "text_column of pretraining_dataset)."
                    )
                found = False


# Keys of a dataset that determine its documents. Files may have moved, so paths are not compared.
_SOURCE = ("name", "split", "revision", "field", "skip", "ds_type", "weight")


def load_stream(config: StreamSettings, tokenizer: PreTrainedTokenizerBase) -> LoadedRows:
    """The stream of `datasets`, and the rows of `test_datasets`, if any.

    The first row of each source is read, so that sources that cannot be used are reported before a model is loaded.
    """
    stream = stream_rows(config, tokenizer)
    if not config.test_datasets:
        return LoadedRows(stream, None, [])
    evaluation, found = load_section_of_tokens(config, tokenizer, "test_datasets")
    return LoadedRows(stream, evaluation, [found])


def stream_rows(config: StreamSettings, tokenizer: PreTrainedTokenizerBase) -> StreamRows:
    """The stream of `datasets`."""
    functions = [tokeniser(entry, config, tokenizer) for entry in config.datasets]
    for number, source in enumerate(_sources(config.datasets)):
        _tokens(functions, Document(number, *source.next_row()))
    seed = config.seed if config.data_seed is None else config.data_seed
    order = seed if config.shuffle_merged_datasets else None
    open_all, size = partial(_sources, config.datasets), config.streaming_multipack_buffer_size
    weights = [entry.weight for entry in config.datasets]
    if any(weight is not None for weight in weights):
        shares = [1.0 if weight is None else weight for weight in weights]
        documents: Documents = MixedDocuments(open_all, size, order, shares)
    else:
        documents = Documents(open_all, size, order)
    encode = partial(_tokens, functions)
    return StreamRows(documents, encode, config.sequence_len, config.pretrain_multipack_attn)


def order_of(config: StreamSettings) -> dict[str, Any]:
    """The settings that the order of the documents depends on, by key, as JSON values."""
    entries = [entry.model_dump(include=set(_SOURCE), exclude_defaults=True) for entry in config.datasets]
    shuffles = config.shuffle_merged_datasets
    seed = config.seed if config.data_seed is None else config.data_seed
    return {
        "datasets": entries,
        "shuffle_merged_datasets": shuffles,
        "streaming_multipack_buffer_size": config.streaming_multipack_buffer_size,
        "data_seed": seed if shuffles else None,
    }


def _sources(entries: list[Any]) -> list[Source]:
    return [
        Source(f"{entry.path}, {entry.split}", open_source(entry), entry.skip, partial(problem, entry))
        for entry in entries
    ]


def _tokens(functions: list[Any], document: Document) -> list[int]:
    return functions[document.source](document.row, document.number)["input_ids"]
