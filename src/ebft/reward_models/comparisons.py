"""Reward models with TRL's RewardTrainer: the Bradley-Terry loss of pairs of a chosen and a rejected text.

B  pairs
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from trl import RewardConfig

from ebft.monitor import CountsBudget, StopOnNonFinite
from ebft.monitor.metrics import HeldOutMeans
from ebft.structured.over_trl.comparisons import ResumesComparisons


@dataclass
class RewardModelConfig(RewardConfig):
    """TRL's arguments for rows that are tokenised and within their length, with dropout as the model has it."""

    max_length: int | None = None
    disable_dropout: bool = False


class RewardModelTrainer(CountsBudget, StopOnNonFinite, ResumesComparisons):
    """RewardTrainer whose evaluation reports loss, accuracy and margin as means over the held-out pairs."""

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        self.budget.add(documents=len(inputs["input_ids"]) // 2)
        return super().training_step(model, inputs, num_items_in_batch)

    def evaluation_loop(self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        self._held_out = HeldOutMeans(self.accelerator, len(dataloader.dataset))
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        self.drop_evaluation_metrics()
        output.metrics.update({f"{metric_key_prefix}_{name}": mean for name, mean in self._held_out.means().items()})
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
