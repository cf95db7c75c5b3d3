"""Reward models with TRL's RewardTrainer: the Bradley-Terry loss of pairs of a chosen and a rejected text.

B  pairs
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from trl import RewardConfig, RewardTrainer

from ebft.data.transforms.rows import IGNORE
from ebft.monitor.metrics import HeldOutMeans
from ebft.trainer import MeansOverRows, OverTrainer


@dataclass
class RewardModelConfig(RewardConfig):
    """TRL's arguments for rows that are tokenised and within their length, with dropout as the model has it."""

    max_length: int | None = None
    disable_dropout: bool = False


class ReportsHeldOutMeans(OverTrainer):
    """Trainer whose evaluation reports means over the held-out rows, which `prediction_step` adds to `_held_out`."""

    def evaluation_loop(self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        self._held_out = HeldOutMeans(self.accelerator, len(dataloader.dataset))
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        output.metrics.update({f"{metric_key_prefix}_{name}": mean for name, mean in self._held_out.means().items()})
        return output


class RewardModelTrainer(ReportsHeldOutMeans, MeansOverRows, RewardTrainer):
    """RewardTrainer with loss, accuracy and margin as means over the pairs of a step, and over the held-out pairs."""

    def count_rows(self, inputs: dict[str, Tensor]) -> int:
        return len(inputs["input_ids"]) // 2  # chosen, then rejected

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        for name in ("accuracy", "margin", "mean_reward"):
            self._metrics["train"][name][-1] *= self.share(inputs)
        return loss

    def log(self, *args: Any, **kwargs: Any) -> None:
        for name, extreme in (("min_reward", min), ("max_reward", max)):  # TRL would log means over micro-batches
            if values := self._metrics["train"].get(name):
                self._metrics["train"][name] = [extreme(values)]
        super().log(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        output = super().evaluation_loop(*args, **kwargs)
        self._metrics["eval"].clear()  # means over batches of different sizes
        return output

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Tensor], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, None, None]:
        loss, scores, _ = super().prediction_step(model, inputs, False, ignore_keys)
        chosen, rejected = scores.float().squeeze(-1).chunk(2)  # (B,) each
        pairs = pair_losses(chosen, rejected, self.args.center_rewards_coefficient or 0.0, inputs.get("margin"))
        values = {"loss": pairs, "accuracy": (chosen > rejected).float(), "margin": chosen - rejected}
        self._held_out.add(values, pairs.new_ones(len(pairs)))
        return loss, None, None


def pair_losses(chosen: Tensor, rejected: Tensor, centring: float, margin: Tensor | None = None) -> Tensor:
    """The terms of the loss by pair (B,), whose mean TRL computes; `margin` (B,)."""
    distance = chosen - rejected if margin is None else chosen - rejected - margin.to(chosen)
    return -F.logsigmoid(distance) + centring * (chosen + rejected) ** 2


class ProcessRewardTrainer(ReportsHeldOutMeans):
    """Trainer of a token classifier; loss and accuracy are means over steps, also over accumulated batches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, compute_loss_func=step_loss, **kwargs)

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        self.budget.add(documents=len(inputs["input_ids"]))
        return super().training_step(model, inputs, num_items_in_batch)

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
