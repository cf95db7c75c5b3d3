"""Losses, gradients and weights that are not finite end training before they are applied or saved.

Weights and saved checkpoints are then those of the last valid step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ebft.errors import NonFiniteLossError

_HINT = (
    "The update was not applied, and saved checkpoints are valid. Check these documents and resume training, or "
    "start a new run from the weights of a checkpoint with a smaller learning_rate (lora_model_dir or base_model): "
    "resuming would keep the learning rate."
)


def check_loss(loss: Tensor, step: int, inputs: Any) -> None:
    """Raise NonFiniteLossError for the loss of a batch that is NaN or infinite."""
    if not torch.isfinite(loss):
        raise NonFiniteLossError(
            f"The loss is {loss.item()} at step {step}, in a batch of {_describe(inputs)}. " + _HINT
        )


def check_grad_norm(norm: Any, step: int) -> None:
    """Raise NonFiniteLossError for a gradient norm that is NaN or infinite."""
    if not math.isfinite(norm):
        raise NonFiniteLossError(f"The gradient norm is {norm} at step {step}. " + _HINT)


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
