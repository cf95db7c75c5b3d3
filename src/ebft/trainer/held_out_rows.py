"""Held-out rows of several processes: every row is evaluated by one process, or by all of them at the same time."""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import DataLoaderShard
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer


class EvaluatesRowsOnce(Trainer):
    """Trainer whose batches of an evaluation do not repeat rows to fill the last batch of every process.

    `copies`: the number of processes that evaluate the rows of the current batch, by which their weights are divided.
    """

    copies: int = 1
    _copies_of_batches: tuple[int, ...] = ()  # in reverse

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        self._copies_of_batches = ()
        if self.args.world_size == 1:
            return super().get_eval_dataloader(dataset)
        dataset = dataset if hasattr(dataset, "__len__") else list(dataset)
        order = self.held_out_order(dataset)
        size, rank, processes = self.args.eval_batch_size, self.args.process_index, self.args.world_size
        batches, copies = held_out_batches(len(order), size, rank, processes)
        self._copies_of_batches = tuple(reversed(copies))
        return DataLoaderShard(
            dataset,
            device=self.accelerator.device,
            batch_sampler=[[order[position] for position in batch] for batch in batches],
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )

    def held_out_order(self, dataset: Any) -> list[int]:
        """Return the indices of the rows of an evaluation by several processes, in order; they may occur repeatedly."""
        return list(range(len(dataset)))

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Any, Any]:
        *self._copies_of_batches, self.copies = self._copies_of_batches or (1,)
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)


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
