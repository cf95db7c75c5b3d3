"""SFT with transformers' Trainer; evaluation reports the same cross-entropies as the other methods.

B  rows   S  tokens   V  vocabulary
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ebft.data.transforms.rows import IGNORE
from ebft.monitor import CountsBudget, StopOnNonFinite
from ebft.monitor.metrics import HeldOutMeans
from ebft.over_trainer import OverTrainer
from ebft.scores import perplexities


class SFTTrainer(CountsBudget, StopOnNonFinite, OverTrainer):
    """Supervised fine-tuning with the cross-entropy loss."""

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        self.budget.add(documents=len(inputs["input_ids"]))
        return super().training_step(model, inputs, num_items_in_batch)

    def evaluation_loop(self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        rows = len(dataloader.dataset) if hasattr(dataloader.dataset, "__len__") else None
        self._held_out = {name: HeldOutMeans(self.accelerator, rows) for name in ("ce_loss", "ce_loss_all")}
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        means = {name: mean for held_out in self._held_out.values() for name, mean in held_out.means().items()}
        means |= perplexities(means)
        output.metrics.update({f"{metric_key_prefix}_{name}": mean for name, mean in means.items()})
        return output

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Tensor], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, None, None]:
        loss, logits, _ = super().prediction_step(model, inputs, False, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        nll = token_losses(logits, inputs["input_ids"])
        real = inputs["attention_mask"][:, 1:].bool()
        masks = {"ce_loss": real & inputs["labels"][:, 1:].ne(IGNORE), "ce_loss_all": real}
        for name, mask in masks.items():
            counts = mask.sum(-1)
            self._held_out[name].add({name: (nll * mask).sum(-1) / counts.clamp_min(1)}, counts)
        return loss, None, None


def token_losses(logits: Tensor, input_ids: Tensor) -> Tensor:
    """Negative log-likelihood of tokens 1.. of each row from logits (B, S, V): (B, S - 1), float32."""
    with torch.no_grad():
        return F.cross_entropy(logits[:, :-1].float().transpose(1, 2), input_ids[:, 1:], reduction="none")
