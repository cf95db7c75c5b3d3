"""Packing of several short documents into one row, so that batches are filled regardless of document lengths."""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections import defaultdict
from typing import Any

from torch.utils.data import Dataset

from ebft.data.lengths import token_counts
from ebft.printed import say


class PackedRows(Dataset):
    """Rows `{"documents": [...]}`, each the rows of another dataset that were packed together.

    Documents of a row do not attend to each other. `DocumentCollator` splits them again, for the strided trainer, which
    concatenates all documents of a batch; `JoiningCollator` concatenates those of each row. `lengths` are the numbers
    of tokens per row.
    """

    def __init__(self, rows: Any, packs: list[list[int]], lengths: list[int]):
        self._rows, self._packs, self.lengths = rows, packs, lengths

    def __len__(self) -> int:
        return len(self._packs)

    def select(self, indices: list[int]) -> PackedRows:
        """Return these rows only, in this order."""
        return PackedRows(self._rows, [self._packs[i] for i in indices], [self.lengths[i] for i in indices])

    def __getitem__(self, index: int) -> dict[str, list[dict[str, Any]]]:
        return {"documents": [self._rows[i] for i in self._packs[index]]}


def pack_and_report(rows: Any, length: int) -> PackedRows:
    """`pack_rows`, with a line on the terminal about the result."""
    packed = pack_rows(rows, length)
    if os.environ.get("RANK", "0") == "0":
        full = sum(packed.lengths) / (len(packed) * length)
        before, after = (f"{count:,} row{'s' * (count != 1)}" for count in (len(rows), len(packed)))
        say(
            f"Packed {before} into {after} of up to {length} tokens ({full:.0%} full)",
            err=True,
        )
    return packed


def pack_rows(rows: Any, length: int) -> PackedRows:
    """Pack the rows of a dataset (with `input_ids`) by best fit, longest first, into rows of up to `length` tokens.

    A longer row is not packed with others. Packing is deterministic.
    """
    sizes = token_counts(rows)
    packs: list[list[int]] = []
    room: dict[int, list[int]] = defaultdict(list)  # packs by their number of free tokens
    used: list[int] = []
    free: list[int] = []  # the keys of `room`, ascending
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[index]
        at = bisect_left(free, size)
        if at == len(free):
            pack = len(packs)
            packs.append([])
            used.append(0)
        else:
            pack = room[free[at]].pop()
            if not room[free[at]]:
                free.pop(at)
        packs[pack].append(index)
        used[pack] += size
        left = length - used[pack]
        if left > 0:
            if not room[left]:
                insort(free, left)
            room[left].append(pack)
    return PackedRows(rows, packs, used)
