"""What TRL's preference trainers log: kept in checkpoints, and weighted by rows in evaluations."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from ebft.models.sharding import keep_output_dtype
from ebft.over_trainer import OverTrainer
from ebft.over_trainer.held_out_rows import EvaluatesRowsOnce

Logged = defaultdict[str, list[float]]


class KeepsMetrics(EvaluatesRowsOnce, OverTrainer):
    """Trainer whose metrics continue after a resume, and whose means of an evaluation count every row once.

    TRL logs the mean over the rows of all processes for each batch. `loss_name`: the name of the loss in
    `logged("eval")`.
    """

    loss_name = "loss"

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

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, None, None]:
        logged = self.logged("eval")
        before = {name: len(values) for name, values in logged.items()}
        found = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if self.args.world_size > 1:
            logged[self.loss_name].append(self.accelerator.reduce(found[0], reduction="mean").item())
        for name, values in logged.items():  # TRL logs the mean of the values, one for each batch
            if len(values) > before.get(name, 0):
                values += values[-1:] * (self._rows_of_all(name, inputs) // self.copies - 1)
        return found

    def _rows_of_all(self, name: str, inputs: dict[str, Any]) -> int:
        """Return `rows_behind`, summed over processes."""
        rows = self.rows_behind(name, inputs)
        if self.args.world_size == 1:
            return rows
        return int(self.accelerator.reduce(torch.tensor(rows, device=self.accelerator.device), reduction="sum"))
