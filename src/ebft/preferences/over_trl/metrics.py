"""What TRL's preference trainers log: kept in checkpoints, and weighted by rows in evaluations."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ebft.models.sharding import keep_output_dtype
from ebft.over_trainer import OverTrainer

Logged = defaultdict[str, list[float]]


class KeepsMetrics(OverTrainer):
    """Trainer whose metrics continue after a resume, and whose means of an evaluation count every row once.

    TRL logs the mean over the rows of all processes for each batch. `loss_name`: the name of the loss in
    `logged("eval")`.
    """

    loss_name = "loss"
    _copies: list[
        int
    ]  # of each batch of an evaluation, in reverse: the number of processes that evaluate the same rows

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        keep_output_dtype(self.accelerator)  # before the reference model is sharded

    @abstractmethod
    def logged(self, mode: str) -> Logged:
        """Return the values of the batches since the last log of `train` or `eval`, by metric."""

    @abstractmethod
    def rows_behind(self, name: str, inputs: dict[str, Tensor]) -> int:
        """Return the number of rows of a batch that a metric is a mean of."""

    def running_state(self) -> dict[str, Any]:
        metrics = {name: list(values) for name, values in self.logged("train").items()}
        return super().running_state() | {"metrics": metrics}

    def restore_running_state(self, state: dict[str, Any]) -> None:
        super().restore_running_state(state)
        self.logged("train").update(state.get("metrics", {}))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if self.args.world_size == 1:
            return super().get_eval_dataloader(dataset)
        size, rank, processes = self.args.eval_batch_size, self.args.process_index, self.args.world_size
        batches, copies = held_out_batches(len(dataset), size, rank, processes)
        self._copies = copies[::-1]
        return DataLoaderShard(
            dataset,
            device=self.accelerator.device,
            batch_sampler=batches,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, None, None]:
        logged = self.logged("eval")
        before = {name: len(values) for name, values in logged.items()}
        found = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        copies = 1
        if self.args.world_size > 1:
            copies = self._copies.pop()
            logged[self.loss_name].append(self.accelerator.reduce(found[0], reduction="mean").item())
        for name, values in logged.items():  # TRL logs the mean of the values, one for each batch
            if len(values) > before.get(name, 0):
                values += values[-1:] * (self._rows_of_all(name, inputs) // copies - 1)
        return found

    def _rows_of_all(self, name: str, inputs: dict[str, Any]) -> int:
        """Return `rows_behind`, summed over processes."""
        rows = self.rows_behind(name, inputs)
        if self.args.world_size == 1:
            return rows
        return int(self.accelerator.reduce(torch.tensor(rows, device=self.accelerator.device), reduction="sum"))


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
