"""The raw rows of several sources in blocks, and exact positions from which they can be read again.

A block is what is in memory at once. Its rows are shuffled among themselves, so that the position of a row is the
position of its block in the sources, and its place in the block: resuming reads one block again, and no more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from datasets import IterableDataset

from ebft.errors import DataError, EBFTError, cause

State = dict[str, Any]  # of JSON values


class Document(NamedTuple):
    """A raw row, with the number of its source and its number within the source."""

    source: int
    number: int
    row: dict[str, Any]


class Block(NamedTuple):
    """Rows that are in memory together, in the order of training; `start` is the position before them."""

    start: State
    documents: list[Document]
    ends_pass: bool  # whether the sources begin again after it


class Source:
    """The rows of one dataset entry, in order; `name` is its name in messages, and `explain` finds what is wrong."""

    def __init__(
        self,
        name: str,
        rows: IterableDataset,
        skip: int = 0,
        explain: Callable[[Exception], str | None] = lambda error: None,
    ) -> None:
        self.name, self._skip, self._explain = name, skip, explain
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
        """The next row and its number, or None at the end. Raises DataError if it cannot be read."""
        self._is_moving = True
        try:
            row = next(self._iterator, None)
        except EBFTError:
            raise
        except Exception as error:  # builders, parsers and networks raise many types of errors
            raise DataError(
                self._explain(error)
                or f"{self.name}: cannot be read after row {self._skip + self._read} ({cause(error)})."
            ) from error
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


class Documents:
    """The rows of all sources, one source after the other and then again from the first, in blocks of `size` rows.

    A block ends with the last source, so that each row is read once before any is read again. `seed`: of the order of
    the rows in a block; None for that of the sources.
    """

    def __init__(self, sources: Callable[[], list[Source]], size: int, seed: int | None) -> None:
        self._open, self._size, self._seed = sources, size, seed

    def blocks(self, start: State | None = None) -> Iterator[Block]:
        """Blocks without end, from the first or from a block's `start` on."""
        sources = self._open()
        number, current = 0, 0
        if start is not None:
            number, current = start["block"], start["source"]
            sources[current].restore(start["rows"])
        while True:
            before = {"block": number, "source": current, "rows": sources[current].state()}
            found: list[Document] = []
            while len(found) < self._size and current < len(sources):
                row = sources[current].next_row()
                if row is None:
                    current += 1
                else:
                    found.append(Document(current, *row))
            ends = current == len(sources)
            yield Block(before, self._shuffled(found, number), ends)
            number += 1
            if ends:
                current = 0
                for source in sources:
                    source.begin()

    def _shuffled(self, documents: list[Document], number: int) -> list[Document]:
        if self._seed is None:
            return documents
        return [documents[place] for place in np.random.default_rng([self._seed, number]).permutation(len(documents))]


class MixedDocuments(Documents):
    """The rows of all sources in the proportion of `weights`, in blocks of `size` rows.

    The next row is that of the source that has given the fewest rows for its weight, so that every stretch of the
    stream has the same mixture. A source that ends begins again. A pass ends with the block in which the last source
    has ended.
    """

    def __init__(
        self, sources: Callable[[], list[Source]], size: int, seed: int | None, weights: Sequence[float]
    ) -> None:
        super().__init__(sources, size, seed)
        self._weights = weights

    def blocks(self, start: State | None = None) -> Iterator[Block]:
        """Blocks without end, from the first or from a block's `start` on."""
        sources = self._open()
        number, taken, ended = 0, [0] * len(sources), set[int]()
        if start is not None:
            number, taken, ended = start["block"], list(start["taken"]), set(start["ended"])
            for source, state in zip(sources, start["sources"], strict=True):
                source.restore(state)
        while True:
            states = [source.state() for source in sources]
            before = {"block": number, "taken": list(taken), "ended": sorted(ended), "sources": states}
            found: list[Document] = []
            while len(found) < self._size:
                current = min(range(len(sources)), key=lambda place: (taken[place] + 1) / self._weights[place])
                row = sources[current].next_row()
                if row is None:
                    ended.add(current)
                    sources[current].begin()
                    continue
                taken[current] += 1
                found.append(Document(current, *row))
            ends = len(ended) == len(sources)
            yield Block(before, self._shuffled(found, number), ends)
            number += 1
            if ends:
                ended.clear()
