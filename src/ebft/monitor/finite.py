"""Stopping before an update that would be made from NaN or infinity."""

from __future__ import annotations

import math
from typing import Any

import torch

from ebft.errors import NonFiniteLossError


class StopOnNonFinite:
    """Mixin for a transformers Trainer: a loss or a gradient norm that is not finite ends the run before the update.

    Weights and saved checkpoints are then those of the last good step. With fp16 an infinite gradient is left to the
    gradient scaler, which skips the update and lowers its scale.
    """

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not torch.isfinite(loss):
            raise NonFiniteLossError(
                f"The loss is {loss.item()} at step {self.state.global_step}, in a batch of {_describe(inputs)}. "
                + _HINT
            )
        return loss

    def _get_grad_norm(self, model, grad_norm=None):
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None and not self.args.fp16 and not math.isfinite(norm):
            raise NonFiniteLossError(f"The gradient norm is {norm} at step {self.state.global_step}. " + _HINT)
        return norm


_HINT = (
    "No update was made from it and saved checkpoints are good: lower learning_rate or look at these documents, "
    "then go on with resume_from_checkpoint."
)


def _describe(inputs: dict[str, Any]) -> str:
    """The batch's documents by length and first tokens, enough to find them again."""
    if isinstance(inputs, list):  # rows of prompts
        return "prompts that begin with " + ", ".join(repr(str(row["prompt"])[:60]) for row in inputs[:3])
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask")
    lengths = [ids.shape[1]] * len(ids) if mask is None else mask.sum(1).tolist()
    return f"documents with {lengths} tokens that begin with token ids {ids[:, :8].tolist()}"
