"""Held-out rows of several processes: every row is evaluated by one process, or by all of them at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader


class HeldOutRows:
    """The batches of a trainer's evaluation, which do not repeat rows to fill the last batch of every process.

    `order`: returns the indices of the rows of a dataset in the order of their evaluation, which may occur repeatedly;
    if unset, each row is evaluated once.
    `copies`: the number of processes that evaluate the rows of the current batch, by which their weights are divided.
    """

    def __init__(self, trainer: Any, order: Callable[[Any], Sequence[int]] | None = None) -> None:
        self._trainer, self._order = trainer, order
        self.copies: int = 1
        self._copies_of_batches: Sequence[int] = ()

    def loader(self, dataset: Any, of_one_process: Callable[[Any], DataLoader]) -> DataLoader:
        """Return the loader of an evaluation; `dataset` is the name of one if it is text, by default the trainer's."""
        trainer, args = self._trainer, self._trainer.args
        dataset = trainer.eval_dataset if dataset is None else dataset
        if isinstance(dataset, str):
            dataset = trainer.eval_dataset[dataset]
        self._copies_of_batches = ()
        if args.world_size == 1:
            return of_one_process(dataset)
        dataset = dataset if hasattr(dataset, "__len__") else list(dataset)
        order = range(len(dataset)) if self._order is None else self._order(dataset)
        batches, self._copies_of_batches = held_out_batches(
            len(order), args.eval_batch_size, args.process_index, args.world_size
        )
        return DataLoaderShard(
            dataset,
            device=trainer.accelerator.device,
            batch_sampler=[[order[position] for position in batch] for batch in batches],
            collate_fn=trainer.data_collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
        )

    def begin_batch(self) -> None:
        """Make the next batch the current one."""
        self.copies, *self._copies_of_batches = self._copies_of_batches or (1,)


def held_out_batches(rows: int, size: int, rank: int, processes: int) -> tuple[list[list[int]], list[int]]:
    """Return the batches of a process, and for each the number of processes that have the same one.

    All processes have the same number of batches. Rows that do not fill a batch of each are evaluated by all of them.
    """
    whole = rows // (size * processes)
    starts = [(batch * processes + rank) * size for batch in range(whole)]
    rest = range(whole * size * processes, rows, size)
    batches = [list(range(start, start + size)) for start in starts]
    batches += [list(range(start, min(start + size, rows))) for start in rest]
    return batches, [1] * whole + [processes] * len(rest)
