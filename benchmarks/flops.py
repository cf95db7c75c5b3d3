"""FLOPs of a step: those that it executes, counted, and those that no implementation can do without, from shapes."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.presets import OPTIONS, num_blocks
from ebft.features import feature_depths
from ebft.models.causal_lm import decoder_layers, unwrap_adapter

# Fused attention and its matrix products: two forward, five backward, of which one computes the scores again.
_FUSED = {
    f"_scaled_dot_product_{kind}{suffix}": products
    for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    for suffix, products in (("", 2), ("_backward", 5))
}


def counted_flops(step: Callable[[], object]) -> int:
    """FLOPs of the matrix products that `step` executes, recomputation in backward included."""
    with flop_counter() as counter:
        step()
    return counter.get_total_flops()


def flop_counter() -> FlopCounterMode:
    """PyTorch's counter, with every fused attention, and only the pairs that a causal mask leaves."""
    formulas = {getattr(torch.ops.aten, name): _attention_formula(name) for name in _FUSED}
    formulas[torch.ops.mkldnn._linear_pointwise] = lambda x, weight, *args, **kwargs: 2 * prod(x) * weight[0]
    return FlopCounterMode(display=False, custom_mapping=formulas)


def _attention_formula(name: str) -> Callable[..., int]:
    names = [argument.name for argument in getattr(torch.ops.aten, name).default._schema.arguments]

    def formula(*args, out_shape=None, **kwargs) -> int:
        given = {**dict(zip(names, args)), **kwargs}  # tensors come as their shapes
        batch, heads, queries, width = given["query"]
        keys = given["key"][2]
        pairs = queries * (queries + 1) // 2 if given.get("is_causal") else queries * keys
        return 2 * _FUSED[name] * batch * heads * pairs * width

    return formula


def needed_flops(model: nn.Module, length: int) -> dict[str, int]:
    """FLOPs by phase of the matrix products that the algorithm cannot do without, for one document.

    Each rollout counts by itself, also where several begin with the same tokens, which depends on what is sampled.

    Sampling runs the document and every rollout but its last token through all layers, features run all of it up to the
    deepest feature, and the head runs on what is sampled. Training needs no forward pass of its own. Attention counts
    allowed pairs: two products forward, four backward. Backward of a product is one for its input and, unless the
    weight is frozen, one for itself.
    """
    causal_lm = unwrap_adapter(model)
    layers, config = decoder_layers(causal_lm), causal_lm.config
    blocks, samples, steps = num_blocks(length), OPTIONS["n_samples_per_prompt"], OPTIONS["generate_max_len"]
    depth = max(feature_depths(OPTIONS["feature_layers"], len(layers)))
    anchors = range(OPTIONS["context_length"], length, OPTIONS["stride"])[:blocks]

    def tokens(rollout_steps: int) -> int:
        return length + samples * blocks * rollout_steps

    def attention(rollout_steps: int) -> int:
        own = blocks * rollout_steps * (rollout_steps + 1) // 2
        pairs = length * (length + 1) // 2 + samples * (rollout_steps * sum(anchors) + own)
        return 4 * config.num_attention_heads * layers[0].self_attn.head_dim * pairs

    weights = [(n, m.weight) for n, m in layers[0].named_modules() if isinstance(m, nn.Linear)]
    frozen_network = sum(w.numel() for n, w in weights if "lora_" not in n)
    policy = sum(w.numel() for _, w in weights)
    policy_backward = sum(w.numel() * (1 + w.requires_grad) for _, w in weights)
    head = causal_lm.get_output_embeddings().weight
    # The rollouts of a block share the distribution of their first token.
    logits = 2 * blocks * (1 + samples * (steps - 1)) * head.numel()

    backward = len(layers) * (2 * policy_backward * tokens(steps - 1) + 2 * attention(steps - 1))
    return {
        "rollout": len(layers) * (2 * policy * tokens(steps - 1) + attention(steps - 1)) + logits,
        "features": depth * (2 * frozen_network * tokens(steps) + attention(steps)),
        "backward": backward + logits * (1 + head.requires_grad),
    }
