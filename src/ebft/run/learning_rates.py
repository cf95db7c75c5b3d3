"""The learning rate of each parameter: `lr_groups`, `embedding_lr` and LoRA+ (`loraplus_lr_ratio`)."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ebft.config.schema import RunConfig
from ebft.errors import ModelError
from ebft.models.causal_lm import unwrap_adapter
from ebft.run.keys import RATE_KEYS


def rates_of(config: RunConfig, model: nn.Module) -> Callable[[str], float] | None:
    """A function from the names of parameters to their learning rates; None if all have the same one.

    The first that applies: an element of `lr_groups`, the rate of embeddings, that of LoRA+. Raises ModelError if an
    element of `lr_groups` applies to no trained parameter.
    """
    if all(getattr(config, key) is None for key in RATE_KEYS):
        return None
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for group in config.lr_groups or []:
        for part in group.modules:
            if not any(part in name for name in trained):
                raise ModelError(f"lr_groups: {part!r} is not part of the name of a trained parameter. Remove it.")
    embeddings = _embedding_names(model)
    rate = config.learning_rate
    # PEFT's LoRA+ also multiplies the rate of vectors: the magnitudes of DoRA, biases and norms.
    vectors = {name for name, parameter in model.named_parameters() if parameter.ndim == 1}

    def rate_of(name: str) -> float:
        for group in config.lr_groups or []:
            if any(part in name for part in group.modules):
                return group.lr
        if config.loraplus_lr_ratio is not None and "lora_embedding_" in name:
            return config.loraplus_lr_embedding or 1e-6
        if any(f".{part}." in f".{name}" for part in embeddings):
            if config.embedding_lr is not None:
                return config.embedding_lr
            if config.embedding_lr_scale is not None:
                return rate * config.embedding_lr_scale
        if config.loraplus_lr_ratio is not None and ("lora_B" in name or name in vectors):
            return rate * config.loraplus_lr_ratio
        return rate

    return rate_of


def _embedding_names(model: nn.Module) -> set[str]:
    """Last parts of the names of the input embedding and the output layer, such as embed_tokens and lm_head."""
    causal_lm = unwrap_adapter(model)
    both = [causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()]
    named = causal_lm.named_modules()
    return {name.rpartition(".")[2] for name, module in named if any(module is layer for layer in both)}
