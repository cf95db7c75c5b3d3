"""Stopping before an update with a NaN or infinite loss or gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ebft.errors import NonFiniteLossError


class StopOnNonFinite:
    """Mixin for a transformers Trainer: raises NonFiniteLossError before an update with a non-finite loss or gradient.

    Weights and saved checkpoints are then those of the last valid step. With fp16, infinite gradients are handled by
    the gradient scaler, which skips the update and reduces its scale.
    """

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not torch.isfinite(loss):
            raise NonFiniteLossError(
                f"The loss is {loss.item()} at step {self.state.global_step + 1}, in a batch of {_describe(inputs)}. "
                + _HINT
            )
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None and not self.args.fp16 and not math.isfinite(norm):
            raise NonFiniteLossError(f"The gradient norm is {norm} at step {self.state.global_step + 1}. " + _HINT)
        return norm


def check_weights(model: nn.Module, anywhere: Callable[[bool], bool]) -> None:
    """Raise NonFiniteLossError if a trained weight is NaN or infinite, here or `anywhere`, on any process."""
    local = ((name, each.to_local() if hasattr(each, "to_local") else each) for name, each in model.named_parameters())
    found = [name for name, each in local if each.requires_grad and not torch.isfinite(each).all()]
    if anywhere(bool(found)):
        raise NonFiniteLossError(
            f"Weights are NaN or infinite after the last step{f' (first {found[0]})' if found else ''}, although its "
            "loss was finite, so the final model was not saved. A plugin changed them, the last update overflowed, or "
            "they were so in base_model. Check the plugins and base_model, or reduce learning_rate; an "
            "earlier checkpoint can be used as base_model or lora_model_dir."
        )


_HINT = (
    "The update was not applied, and saved checkpoints are valid. Check these documents and resume training, or "
    "start a new run from the weights of a checkpoint with a smaller learning_rate (lora_model_dir or base_model): "
    "resuming would keep the learning rate."
)


def _describe(inputs: dict[str, Any]) -> str:
    """Describe the documents of a batch by length and first tokens, so that they can be identified."""
    if isinstance(inputs, list):  # rows of prompts
        return "prompts that start with " + ", ".join(repr(str(row["prompt"])[:60]) for row in inputs[:3])
    side = "" if "input_ids" in inputs else "chosen_"  # of pairs
    ids = inputs[f"{side}input_ids"]
    mask = inputs.get(f"{side}attention_mask")
    lengths = [ids.shape[1]] * len(ids) if mask is None else mask.sum(1).tolist()
    rows = "packed rows" if "position_ids" in inputs else "documents"
    return f"{rows} with {lengths} tokens that start with token ids {ids[:, :8].tolist()}"
