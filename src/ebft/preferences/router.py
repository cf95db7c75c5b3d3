"""Mixtures of experts without a loss of their router."""

from __future__ import annotations

from torch import nn

from ebft.models.causal_lm import unwrap_adapter


def without_router_loss(model: nn.Module) -> None:
    """Let a mixture of experts return no load-balancing loss, which TRL would add to those of preference methods."""
    config = unwrap_adapter(model).config
    for settings in (config, config.get_text_config()):
        if hasattr(settings, "output_router_logits"):
            settings.output_router_logits = False
