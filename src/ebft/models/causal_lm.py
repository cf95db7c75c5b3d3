"""Access to the parts of a transformers causal LM: backbone, decoder layers, train and eval mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from ebft.errors import ModelError


def unwrap_adapter(model: nn.Module) -> PreTrainedModel:
    """The causal LM itself, unwrapped from a PEFT adapter if there is one, and from an engine of DeepSpeed."""
    if type(model).__name__ == "DeepSpeedEngine":  # around the reference model of TRL
        model = model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def backbone_name(causal_lm: PreTrainedModel) -> str:
    """The attribute that contains the decoder, without the language-model head."""
    if isinstance(causal_lm._modules.get(causal_lm.base_model_prefix), PreTrainedModel):
        return causal_lm.base_model_prefix
    names = [name for name, child in causal_lm.named_children() if isinstance(child, PreTrainedModel)]
    if len(names) != 1:
        raise ModelError(
            f"{type(causal_lm).__name__} does not have the layout of a causal LM in transformers (one decoder and one "
            f"head): its decoders are {names or 'none'}. Load it with AutoModelForCausalLM"
        )
    return names[0]


def backbone_of(causal_lm: PreTrainedModel) -> nn.Module:
    """The decoder, without the language-model head."""
    return causal_lm._modules[backbone_name(causal_lm)]


def layers_at(causal_lm: PreTrainedModel) -> tuple[nn.Module, str]:
    """The module that owns the decoder layers, and the name of its ModuleList."""
    if "_decoder_layers_at" not in causal_lm.__dict__:  # cached, because truncation changes what a search finds
        causal_lm.__dict__["_decoder_layers_at"] = _find_layers(causal_lm)
    return causal_lm.__dict__["_decoder_layers_at"]


def decoder_layers(causal_lm: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers that a forward pass runs through, in order."""
    return getattr(*layers_at(causal_lm))


@contextmanager
def first_layers(causal_lm: PreTrainedModel, count: int) -> Iterator[nn.ModuleList]:
    """Context manager in which the decoder consists of its first `count` layers only, and then its final norm."""
    owner, name = layers_at(causal_lm)
    layers = getattr(owner, name)
    owner._modules[name] = layers[:count]
    try:
        yield owner._modules[name]
    finally:
        owner._modules[name] = layers


def _find_layers(causal_lm: PreTrainedModel) -> tuple[nn.Module, str]:
    depth = causal_lm.config.get_text_config().num_hidden_layers
    for module in backbone_of(causal_lm).modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == depth:
                return module, name
    raise ModelError(
        f"{type(causal_lm).__name__} does not keep its {depth} decoder layers in a ModuleList, so features cannot be "
        "extracted from them. EBFT supports decoder-only models with the layout of transformers"
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context manager for eval mode without gradients; restores the previous mode of every module afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
