"""Preparation of the model that is passed to a trainer: loading by name, adapter, dropout."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftType, get_peft_model
from torch import nn
from transformers import PreTrainedModel, set_seed

from ebft.errors import ModelError
from ebft.models.causal_lm import unwrap_adapter
from ebft.models.pretrained import find_model, pretrained_model
from ebft.over_transformers import QuantizationMethod

_RATE = re.compile("drop|jitter")  # in names of attributes
# Routers that draw experts at random in training mode, and whose jitter is a threshold of the experts in both modes.
_SAMPLING_ROUTERS = {"PhimoeTopKRouter"}

# LoRA initialisations that move a part of the base weights into the adapter.
_REWRITE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def load(model: Any, peft_config: Any = None, seed: int = 0) -> nn.Module:
    """The model, loaded if it is a name, with a new adapter (initialised with `seed`) if `peft_config` is given."""
    if isinstance(model, str):
        model = pretrained_model(find_model(model, "model"))
    if not isinstance(model, nn.Module):
        raise ModelError(f"model must be a causal language model or the name of one, got {model!r}")
    _check_dense(model)
    _check_experts(model)
    if peft_config is None:
        return model
    if hasattr(model, "disable_adapter"):
        raise ModelError(
            "the model already has an adapter: use peft_config with a model without adapter, or leave it out"
        )
    set_seed(seed)
    return get_peft_model(model, peft_config)


def _check_dense(model: nn.Module) -> None:
    """Raise ModelError for a GGUF model as loaded by default: quantised, it can be neither trained nor saved."""
    causal_lm = unwrap_adapter(model)
    method = getattr(causal_lm, "quantization_method", None)  # set by transformers alone
    if method == QuantizationMethod.GGUF:
        raise ModelError(
            "model was loaded from a GGUF file as quantised weights, which cannot be trained. Load it with "
            "from_pretrained(folder, gguf_file=..., quantization_config=GgufConfig(dequantize=True)), or pass the path "
            "of the file as model"
        )


def _check_experts(model: nn.Module) -> None:
    """Raise ModelError for experts in float64, whose grouped products PyTorch does not compute."""
    causal_lm = unwrap_adapter(model)
    if (
        not isinstance(causal_lm, PreTrainedModel)
        or "grouped_mm" not in causal_lm.get_experts_implementation().values()
    ):
        return
    if any(weight.dim() == 3 and weight.dtype == torch.float64 for weight in causal_lm.parameters()):
        raise ModelError(
            "the experts of the model are float64, but PyTorch computes grouped products of experts in float32, "
            "bfloat16 and float16 only. Call model.set_experts_implementation('eager'), or model.to(torch.float32)"
        )


def disable_dropout(model: nn.Module) -> None:
    """Set the dropout rates and the router noise of the model to 0, with one warning if an adapter has dropout.

    `rates_as_loaded` restores them for a comparison.
    """
    lora_dropout, rates = 0.0, unwrap_adapter(model).__dict__.setdefault("rates_as_loaded", [])
    for name, module in model.named_modules():
        if type(module).__name__ in _SAMPLING_ROUTERS:
            module.register_forward_pre_hook(_in_eval_mode)
            continue
        found = ["p"] if isinstance(module, nn.Dropout) else []
        # Models that call F.dropout, or add noise to their router, store the rate as a float on the module.
        found += [key for key, value in vars(module).items() if isinstance(value, float) and _RATE.search(key)]
        for attribute in found:
            rate = getattr(module, attribute)
            if rate:
                rates.append((module, attribute, rate))
                setattr(module, attribute, 0.0)
                lora_dropout = max(lora_dropout, rate if "lora_dropout" in name else 0.0)
    if lora_dropout > 0:
        warnings.warn(
            f"lora_dropout: {lora_dropout} is not applied: rollouts are sampled without dropout, so the training "
            "forward pass does not use it either. Set disable_dropout: false to train with dropout",
            stacklevel=4,
        )


def _in_eval_mode(router: nn.Module, args: Any) -> None:
    router.training = False


@contextmanager
def rates_as_loaded(causal_lm: PreTrainedModel) -> Iterator[None]:
    """Context manager in which the model has the rates that `disable_dropout` set to 0.

    They have no effect in eval mode, unless a model uses one of them for something else.
    """
    rates = causal_lm.__dict__.get("rates_as_loaded", [])
    for module, attribute, value in rates:
        setattr(module, attribute, value)
    try:
        yield
    finally:
        for module, attribute, _ in rates:
            setattr(module, attribute, 0.0)


def check_adapter(model: nn.Module) -> None:
    """Raise ModelError for adapters that change the base model, or that are not part of the layers' forward pass."""
    if not hasattr(model, "disable_adapter"):
        return
    kind = model.active_peft_config
    if kind.is_prompt_learning or kind.peft_type == PeftType.ADAPTION_PROMPT:
        raise ModelError(
            f"{type(kind).__name__} adds virtual tokens before the prompt, which EBFT does not support. "
            "Use an adapter of the layers, such as LoraConfig"
        )
    if kind.peft_type == PeftType.ADALORA:
        warnings.warn(
            "AdaLoraConfig: the trainer does not call update_and_allocate, so all ranks stay at init_r, and the loss "
            "has no term for orthogonality. Use LoraConfig if no callback of yours calls it",
            stacklevel=4,
        )
    changed = getattr(kind, "init_lora_weights", True)
    if isinstance(changed, str) and changed.startswith(_REWRITE_BASE):
        raise ModelError(
            f"init_lora_weights={changed!r} modifies the base weights, so the model with its adapter disabled is not "
            "the base model, which must be the feature network. Use the default initialisation"
        )
    own = (model.base_model.prefix, "modules_to_save", "trainable_tokens")
    stray = [n for n, p in model.named_parameters() if p.requires_grad and not any(mark in n for mark in own)]
    if stray:
        raise ModelError(
            f"{len(stray)} parameters of the base model are trainable in addition to the adapter (the first is "
            f"{stray[0]}), so the feature network, which is the model with its adapter disabled, would not be frozen. "
            "Freeze them (LoraConfig(bias='none')), list their modules in modules_to_save, or train without an adapter"
        )
