"""Process reward models with transformers' Trainer: the cross-entropy of the classes of steps.

B  rows   S  tokens   C  classes
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ebft.data.transforms.rows import IGNORE
from ebft.monitor import CountsBudget, StopOnNonFinite
from ebft.monitor.metrics import HeldOutMeans
from ebft.over_trainer import OverTrainer


class ProcessRewardTrainer(CountsBudget, StopOnNonFinite, OverTrainer):
    """Trainer of a token classifier; loss and accuracy are means over steps, also over accumulated batches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, compute_loss_func=step_loss, **kwargs)

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        self.budget.add(documents=len(inputs["input_ids"]))
        return super().training_step(model, inputs, num_items_in_batch)

    def evaluation_loop(self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        self._held_out = HeldOutMeans(self.accelerator, len(dataloader.dataset))
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        output.metrics.update({f"{metric_key_prefix}_{name}": mean for name, mean in self._held_out.means().items()})
        return output

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Tensor], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, None, None]:
        loss, logits, labels = super().prediction_step(model, inputs, False, ignore_keys)
        counts = labels.ne(IGNORE).sum(-1)  # (B,)
        sums = {"loss": step_losses(logits, labels), "accuracy": logits.argmax(-1).eq(labels).float()}  # (B, S)
        self._held_out.add({name: values.sum(-1) / counts for name, values in sums.items()}, counts)
        return loss, None, None


def step_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """The sum over the steps of a batch, divided by the number of steps (of all accumulated batches if it is given)."""
    count = labels.ne(IGNORE).sum() if num_items_in_batch is None else num_items_in_batch
    return step_losses(outputs.logits, labels).sum() / count


def step_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy at each token (B, S), 0 without a label, from logits (B, S, C) at the same position."""
    return F.cross_entropy(logits.float().transpose(1, 2), labels, ignore_index=IGNORE, reduction="none")
