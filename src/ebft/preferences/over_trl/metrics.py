"""What TRL's preference trainers log: kept in checkpoints, and weighted by the rows or tokens of each batch."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ebft.models.sharding import keep_output_dtype
from ebft.over_trainer import OverTrainer
from ebft.over_trainer.held_out_rows import EvaluatesRowsOnce

Logged = defaultdict[str, list[float]]


class KeepsMetrics(EvaluatesRowsOnce, OverTrainer):
    """Trainer whose metrics continue after a resume, and whose means count every row or token once.

    TRL logs the mean of the values of batches, each a mean over the rows or tokens of all processes. `loss_name`: the
    name of the loss in `logged("eval")`. `step_counts`: `counts_behind` of the optimizer step, over all processes,
    while its loss is computed; None at other times. `of_step`: metrics that are normalised by it already.
    """

    loss_name = "loss"
    of_step: ClassVar[tuple[str, ...]] = ()
    step_counts: dict[str, float] | None = None
    _next_counts: dict[str, float]

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        keep_output_dtype(self.accelerator)  # before the reference model is sharded

    @abstractmethod
    def logged(self, mode: str) -> Logged:
        """Return the values of the batches since the last log of `train` or `eval`, by metric."""

    @abstractmethod
    def rows_behind(self, name: str, inputs: dict[str, Tensor]) -> int:
        """Return the number of rows of a batch that a metric is a mean of."""

    @abstractmethod
    def counts_behind(self, inputs: dict[str, Tensor]) -> dict[str, int]:
        """Return the number of items of a batch for metrics that are not means over its rows, always the same names."""

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Tensor | int | None:
        if batch_samples:
            self._next_counts = self._of_all([self.counts_behind(inputs) for inputs in batch_samples])
        return super()._get_num_items_in_batch(batch_samples, device)

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        logged = self.logged("train")
        before = {name: len(values) for name, values in logged.items()}
        self.step_counts = self._next_counts
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)
        finally:
            self.step_counts = None
        for name, count in self._of_all([self.counts_behind(inputs)]).items():
            total = self._next_counts[name]
            if name in self.of_step or not total:
                continue
            values = logged[name]
            if len(values) == before.get(name, 0):  # TRL leaves out means over nothing
                values.append(0.0)
            # The mean over the micro-batches becomes the mean over the items of the step.
            values[-1] *= count * self.current_gradient_accumulation_steps / total
        return loss

    def _of_all(self, counts: list[dict[str, int]]) -> dict[str, float]:
        """Return the sums of counts by name, over batches and processes."""
        sums = torch.tensor([[float(x) for x in of_batch.values()] for of_batch in counts], dtype=torch.float64).sum(0)
        sums = self.accelerator.reduce(sums.to(self.accelerator.device), reduction="sum")
        return dict(zip(counts[0], sums.tolist()))

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
        """Return the number of rows or tokens of a batch that a metric is a mean of, summed over processes."""
        of_batch = self.counts_behind(inputs)
        rows = of_batch.get(name.removeprefix("eval_"), self.rows_behind(name, inputs))
        if self.args.world_size == 1:
            return rows
        return int(self.accelerator.reduce(torch.tensor(rows, device=self.accelerator.device), reduction="sum"))
