"""What TRL's preference trainers log: kept in checkpoints, and weighted by rows in evaluations."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from typing import Any

from torch import Tensor, nn

from ebft.over_trainer import OverTrainer

Logged = defaultdict[str, list[float]]


class KeepsMetrics(OverTrainer):
    """Trainer whose metrics continue after a resume, and whose means of an evaluation count every row once."""

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
        before = {name: len(values) for name, values in self.logged("eval").items()}
        found = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        for name, values in self.logged("eval").items():  # TRL logs the mean of the values, one for each batch
            if len(values) > before.get(name, 0):
                values += values[-1:] * (self.rows_behind(name, inputs) - 1)
        return found
