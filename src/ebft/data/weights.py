"""How often the rows of each dataset appear in an epoch: `weight` of the entries of `datasets`."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset

from ebft.errors import DataError
from ebft.printed import say


def weighted(rows: Dataset, entries: Sequence[Any], firsts: Sequence[int], seed: int) -> Dataset:
    """The training rows, each as often as `weight` of its entry says; 1 where it is unset.

    Each entry has its rows the whole number of times and those of a random part of its documents once more, so that
    the windows of a document stay together. `rows` have the column `document`, and `firsts` are the first documents of
    the entries. The order is that of the entries. Raises DataError if a weight leaves no row of an entry.
    """
    if all(entry.weight is None or entry.weight == 1 for entry in entries):
        return rows
    owner = np.asarray(rows["document"])
    entry_of = np.searchsorted(np.asarray(firsts), owner, side="right") - 1
    taken: list[np.ndarray] = []
    for number, entry in enumerate(entries):
        own = np.flatnonzero(entry_of == number)
        found = _repeated(own, owner, 1.0 if entry.weight is None else entry.weight, (seed, number))
        if len(own) and not len(found):
            documents = len(np.unique(owner[own]))
            raise DataError(
                f"datasets.{number}.weight: {entry.weight} of {documents:,} document{'s' * (documents > 1)} of "
                f"{entry.path} rounds to none. Raise it, or remove the dataset."
            )
        if len(found) != len(own) and os.environ.get("RANK", "0") == "0":
            say(f"datasets.{number}.weight: {entry.weight}: {len(own):,} -> {len(found):,} rows", err=True)
        taken.append(found)
    return rows.select(np.concatenate(taken))


def _repeated(own: np.ndarray, owner: np.ndarray, weight: float, seed: tuple[int, int]) -> np.ndarray:
    """The rows `own` as often as the whole part of the weight, and those of a random part of their documents."""
    times, part = int(weight), weight - int(weight)
    documents = np.unique(owner[own])
    once_more = np.random.default_rng(seed).permutation(documents)[: round(part * len(documents))]
    return np.concatenate([np.tile(own, times), own[np.isin(owner[own], once_more)]])
