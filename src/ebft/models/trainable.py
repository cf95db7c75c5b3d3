"""What a trainer is given as its model, made ready: loaded by name, with an adapter, without dropout."""

from __future__ import annotations

import warnings
from typing import Any

from peft import get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, set_seed

from ebft.errors import ModelError


def load(model: Any, peft_config: Any, seed: int) -> nn.Module:
    """The model, loaded where a name is given, with a new adapter (random from `seed`) where one is asked for."""
    if isinstance(model, str):
        model = AutoModelForCausalLM.from_pretrained(model)
    if not isinstance(model, nn.Module):
        raise ModelError(f"model must be a causal language model or the name of one, got {model!r}")
    if peft_config is None:
        return model
    if hasattr(model, "disable_adapter"):
        raise ModelError("the model has an adapter already: give peft_config with a plain model, or leave it out")
    set_seed(seed)
    return get_peft_model(model, peft_config)


def disable_dropout(model: nn.Module) -> None:
    """Set the dropouts and the router noise of the model to 0, with one warning where an adapter asked for dropout."""
    lora_dropout = 0.0
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            lora_dropout = max(lora_dropout, module.p if "lora_dropout" in name else 0.0)
            module.p = 0.0
        # Models that call F.dropout, or jitter their router, keep the rate as a number on the module.
        for attribute, value in vars(module).items():
            if isinstance(value, float) and ("drop" in attribute or "jitter" in attribute):
                setattr(module, attribute, 0.0)
    if lora_dropout > 0:
        warnings.warn(
            f"lora_dropout {lora_dropout} is not applied: rollouts are sampled without dropout, so the training "
            "forward runs without it too. Set disable_dropout: false to train with it",
            stacklevel=4,
        )
