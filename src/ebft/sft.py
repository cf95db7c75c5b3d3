"""SFT with transformers' Trainer; evaluation reports the same cross-entropies as the other methods.

B  rows   S  tokens   V  vocabulary
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ebft.data.packing import PackedRows
from ebft.data.transforms.rows import IGNORE
from ebft.models.causal_lm import unwrap_adapter
from ebft.monitor import CountsBudget, StopOnNonFinite
from ebft.monitor.metrics import HeldOutMeans
from ebft.over_trainer import OverTrainer
from ebft.over_transformers import has_flash_attention
from ebft.packed import (
    check_layers,
    check_separation,
    count_documents,
    has_label,
    in_rows,
    model_inputs,
    needs_one_row,
)
from ebft.scores import perplexities


class SFTTrainer(CountsBudget, StopOnNonFinite, OverTrainer):
    """Supervised fine-tuning with the cross-entropy loss.

    Rows may be packed (`pack_rows`) if the collator is a JoiningCollator; `batch_flattening` joins the rows of each
    batch into one without padding, with "auto" only if the model has flash attention. Raises ModelError for models
    that do not separate documents in a row.
    """

    def __init__(self, *args: Any, batch_flattening: bool | str = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        has_flash = has_flash_attention(unwrap_adapter(self.model))
        self._flattens: bool = has_flash if batch_flattening == "auto" else bool(batch_flattening)
        self._joins_packed = needs_one_row(self.model)
        self._is_unchecked = True
        packs = any(isinstance(rows, PackedRows) for rows in (self.train_dataset, self.eval_dataset))
        if packs or self._flattens:
            check_layers(self.model)

    def is_padding_free(self, inputs: dict[str, Tensor]) -> bool:
        """Whether the rows of a batch are joined into one."""
        return self._flattens or ("position_ids" in inputs and self._joins_packed)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        inputs = model_inputs(inputs, self.is_padding_free(inputs))
        return super().compute_loss(model, inputs, *args, **kwargs)

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        self._check_once(model, inputs)
        self.budget.add(documents=count_documents(inputs))
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
        self._check_once(model, inputs)
        loss, logits, _ = super().prediction_step(model, inputs, False, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        padding_free = self.is_padding_free(inputs)
        nll = token_losses(logits, model_inputs(inputs, padding_free)["input_ids"])
        nll = in_rows(nll, inputs["attention_mask"]) if padding_free else nll
        real = has_label(inputs)
        masks = {"ce_loss": real & inputs["labels"][:, 1:].ne(IGNORE), "ce_loss_all": real}
        for name, mask in masks.items():
            counts = mask.sum(-1)
            self._held_out[name].add({name: (nll * mask).sum(-1) / counts.clamp_min(1)}, counts)
        return loss, None, None

    def _check_once(self, model: nn.Module, inputs: dict[str, Tensor]) -> None:
        """Compare packed with separate documents before their first batch, when the model is placed and sharded."""
        if not self._is_unchecked or not (self._flattens or "position_ids" in inputs):
            return
        check_layers(self.model)
        # A compiled model would be compiled for the rows of the comparison.
        model = self.model if self.args.torch_compile else model
        with self.accelerator.autocast():
            check_separation(model, unwrap_adapter(self.model), self.is_padding_free(inputs))
        self._is_unchecked = False


def token_losses(logits: Tensor, input_ids: Tensor) -> Tensor:
    """Negative log-likelihood of tokens 1.. of each row from logits (B, S, V): (B, S - 1), float32."""
    with torch.no_grad():
        return F.cross_entropy(logits[:, :-1].float().transpose(1, 2), input_ids[:, 1:], reduction="none")
