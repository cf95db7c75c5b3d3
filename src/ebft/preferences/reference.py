"""The reference model of a run that trains all weights: a frozen copy of the model before training."""

from __future__ import annotations

import copy

from torch import nn


def reference_model(model: nn.Module) -> nn.Module:
    """Return a copy of `model` that is not trained. Made before TRL adds its own head to the model."""
    return copy.deepcopy(model).requires_grad_(False).eval()
