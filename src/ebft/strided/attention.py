"""Attention over [document | rollouts]: every rollout token sees its document prefix and its own block.

Registered with transformers as the attention implementation "ebft_strided". A forward pass that carries a
`StridedPass` in its keyword arguments runs through `strided_attention` below; the pass says which of the three
phases of a step it is (prefill, decode, score) and holds what that phase needs. No (S + rollouts)^2 mask exists:
blocks are taken in groups of neighbours, and a group reads the document's keys up to its last anchor.

    B  documents      S  document tokens     NB  blocks       N  rollouts per block     T  rollout tokens (queries)
    H  query heads    K  key/value heads     Q = H / K        D  head dimension         U  own rollout keys
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from ebft.errors import ModelError
from ebft.strided.layout import StridedLayout

IMPLEMENTATION = "ebft_strided"

# Queries of one group: enough to keep the matrix products busy, few enough that keys beyond a block's own
# anchor stay a small share.
_QUERIES_PER_GROUP = 256

# What attention layers may be handed besides query, key and value. The first row is honoured below. The second
# repeats what the query, key and mask already contain. Anything else that is set changes the scores in a way this
# module does not know.
_HONOURED = {"scaling", "dropout", "softcap", "s_aux", "strided"}
_REDUNDANT = {
    "sliding_window",
    "position_ids",
    "cache_position",
    "is_causal",
    "use_cache",
    "position_embeddings",
}
_REPORTING = {
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "num_items_in_batch",
    "logits_to_keep",
}
_REPORTING |= {"output_router_logits", "past_key_values", "past_key_value", "layer_idx", "deterministic"}


@dataclass(frozen=True)
class MaskPattern:
    """A model's own attention pattern (causal, sliding window, chunked) as a function of two positions."""

    function: Callable

    @property
    def is_causal(self) -> bool:
        return self.function is causal_mask_function

    def allowed(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        """Whether a query at one position may see a key at another: the broadcast shape of both, bool."""
        if self.is_causal:
            return key_position <= query_position
        zero = torch.zeros((), dtype=torch.long, device=key_position.device)
        return self.function(zero, zero, query_position, key_position)


@dataclass
class StridedPass:
    """One forward pass over a layout. `cache` maps a layer to its document keys and values, and rollout ones.

    phase "prefill": documents alone, keys and values kept in the cache.
    phase "decode":  one token (step `first_step`) of every rollout, against the cache, which grows by it.
    phase "score":   [document | rollout tokens 0..steps), all at once, with gradients where enabled.
    """

    layout: StridedLayout
    phase: str
    num_document_tokens: int
    steps: int = 0
    first_step: int = 0
    cache: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    apply_dropout: bool = False
    layers_seen: set[int] = field(default_factory=set)
    previous_implementation: list[str] = field(default_factory=list)

    def position_ids(self) -> Tensor:
        """Positions of the tokens of this pass: (B, tokens)."""
        anchors = self.layout.anchors
        document = torch.arange(self.num_document_tokens, device=anchors.device).expand(anchors.shape[0], -1)
        if self.phase == "prefill":
            return document
        rollout = self.layout.rollout_positions(self.first_step, self.steps)
        return rollout if self.phase == "decode" else torch.cat([document, rollout], dim=1)

    @cached_property
    def groups(self) -> list[tuple[slice, int]]:
        """Neighbouring blocks to attend together, with the number of document keys that they need."""
        size = max(1, _QUERIES_PER_GROUP // max(1, self.layout.num_samples * self.steps))
        last_anchor = self.layout.anchors.amax(0).tolist()
        starts = range(0, self.layout.num_blocks, size)
        return [(slice(b, b + size), max(last_anchor[b : b + size])) for b in starts]


@dataclass(frozen=True)
class _Scores:
    """How one layer turns query-key products into weights."""

    scaling: float
    softcap: float | None
    sinks: Tensor | None  # (H,) learned logits that take part in the softmax and have no value
    dropout: float

    def weights(self, products: Tensor, allowed: Tensor, sinks: Tensor | None) -> Tensor:
        """Softmax over the last dimension, in float32, of masked products; rows of `sinks` (..., 1) are added."""
        scores = products.float() * self.scaling
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~allowed, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], dim=-1)
        weights = scores.softmax(-1)
        if sinks is not None:
            weights = weights[..., :-1]
        return F.dropout(weights, self.dropout) if self.dropout else weights


def strided_attention(module, query, key, value, attention_mask, **kwargs):
    """The attention function that transformers calls in every layer.

    query (B, H, tokens, D), key and value (B, K, tokens, D) -> (B, tokens, H, D), None.
    """
    run: StridedPass | None = kwargs.get("strided")
    if run is None:
        raise ModelError(
            f"{type(module).__name__} does not pass keyword arguments on to its attention function, so strided "
            "EBFT cannot share one document prefix among rollouts. Use `ebft.mode: structured` for this model"
        )
    _check_supported(module, attention_mask, kwargs)
    layer = id(module)
    run.layers_seen.add(layer)
    scores = _Scores(
        scaling=kwargs["scaling"] if kwargs.get("scaling") is not None else query.shape[-1] ** -0.5,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        dropout=(kwargs.get("dropout") or 0.0) if run.apply_dropout else 0.0,
    )
    if run.phase == "decode":
        output = _decode(run, layer, query, key, value, attention_mask, scores)
        return output.transpose(1, 2).contiguous(), None
    s = run.num_document_tokens
    document = _document_attention(query[:, :, :s], key[:, :, :s], value[:, :, :s], attention_mask, scores)
    if run.phase == "prefill":
        run.cache[layer] = (key, value)
        return document.transpose(1, 2).contiguous(), None
    if run.steps == 0:  # one-token rollouts are scored from the document's own states
        return document.transpose(1, 2).contiguous(), None
    rollout = _rollout_attention(
        run,
        query[:, :, s:],
        (key[:, :, :s], value[:, :, :s]),
        (key[:, :, s:], value[:, :, s:]),
        attention_mask,
        scores,
    )
    return torch.cat([document, rollout], dim=2).transpose(1, 2).contiguous(), None


def _decode(run, layer, query, key, value, pattern, scores) -> Tensor:
    """One token per rollout against the cached document and the rollout's own earlier tokens."""
    document_key, document_value, *own = run.cache[layer]
    blocks = (run.layout.num_blocks, run.layout.num_samples)
    key, value = (x.unflatten(2, (*blocks, 1)) for x in (key, value))  # (B, K, NB, N, 1, D)
    own = (torch.cat([own[0], key], 4), torch.cat([own[1], value], 4)) if own else (key, value)
    run.cache[layer] = (document_key, document_value, *own)
    own = tuple(x.flatten(2, 4) for x in own)
    return _rollout_attention(run, query, (document_key, document_value), own, pattern, scores)


def _document_attention(query, key, value, pattern, scores) -> Tensor:
    """Causal attention among document tokens: (B, H, S, D)."""
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, dim=1) if repeat > 1 else x for x in (key, value))
    if scores.softcap is None and scores.sinks is None:
        mask = None
        if not pattern.is_causal:
            position = torch.arange(query.shape[2], device=query.device)
            mask = pattern.allowed(position[:, None], position[None, :])
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout_p=scores.dropout, is_causal=mask is None, scale=scores.scaling
        )
    position = torch.arange(query.shape[2], device=query.device)
    allowed = pattern.allowed(position[:, None], position[None, :])
    sinks = None if scores.sinks is None else scores.sinks.view(1, -1, 1, 1)
    return scores.weights(query @ key.mT, allowed, sinks).to(value.dtype) @ value


def _rollout_attention(run, query, document, own, pattern, scores) -> Tensor:
    """Attention of rollout tokens to their document prefix and their own block, group by group.

    query (B, H, NB*N*T, D); document: key and value (B, K, S, D); own: key and value (B, K, NB*N*U, D), where
    U >= T and the last T keys are the queries' own. Returns (B, H, NB*N*T, D).
    """
    blocks = (run.layout.num_blocks, run.layout.num_samples)
    kv_heads = own[0].shape[1]
    query = query.unflatten(1, (kv_heads, -1)).unflatten(3, (*blocks, run.steps))  # (B, K, Q, NB, N, T, D)
    own_key, own_value = (x.unflatten(2, (*blocks, -1)) for x in own)  # (B, K, NB, N, U, D)
    outputs = []
    for block, last_anchor in run.groups:
        args = (
            query[:, :, :, block],
            document[0][:, :, :last_anchor],
            document[1][:, :, :last_anchor],
            own_key[:, :, block],
            own_value[:, :, block],
            run.layout.anchors[:, block],
            run.first_step,
            pattern,
            scores,
        )
        # Recomputing the weights in backward keeps memory linear in the document's length.
        if torch.is_grad_enabled():
            keep_rng = scores.dropout > 0
            outputs.append(checkpoint(_attend_group, *args, use_reentrant=False, preserve_rng_state=keep_rng))
        else:
            outputs.append(_attend_group(*args))
    return torch.cat(outputs, dim=3).flatten(3, 5).flatten(1, 2)


def _attend_group(query, document_key, document_value, own_key, own_value, anchors, first_step, pattern, scores):
    """One softmax over the document prefix and the own block: (B, K, Q, NB, N, T, D) for the blocks of a group."""
    b, k, q, nb, n, t, d = query.shape
    prefix, u = document_key.shape[2], own_key.shape[4]
    device = query.device
    query_position = anchors[:, :, None] + first_step + torch.arange(t, device=device)  # (B, NB, T)
    key_position = torch.arange(prefix, device=device)
    in_prefix = (key_position < anchors[:, :, None, None]) & pattern.allowed(query_position[..., None], key_position)
    step = torch.arange(u, device=device)
    own_position = anchors[:, :, None, None] + step
    in_own = (step <= first_step + torch.arange(t, device=device)[:, None]) & pattern.allowed(
        query_position[..., None], own_position
    )
    allowed = torch.cat([in_prefix, in_own], dim=-1)[:, None, None, :, None]  # (B, 1, 1, NB, 1, T, P + U)

    prefix_products = (query.reshape(b, k, -1, d) @ document_key.mT).view(b, k, q, nb, n, t, prefix)
    own_products = query @ own_key[:, :, None].mT  # (B, K, Q, NB, N, T, U)
    products = torch.cat([prefix_products, own_products], dim=-1)
    sinks = None if scores.sinks is None else scores.sinks.view(1, k, q, 1, 1, 1, 1)
    weights = scores.weights(products, allowed, sinks).to(document_value.dtype)
    prefix_weights, own_weights = weights.split([prefix, u], dim=-1)
    output = (prefix_weights.reshape(b, k, -1, prefix) @ document_value).view(b, k, q, nb, n, t, -1)
    return output + own_weights @ own_value[:, :, None]


def _check_supported(module, attention_mask, kwargs) -> None:
    """Refuse what would make a strided score differ from the model's own, naming the feature."""
    name = type(module).__name__
    if not isinstance(attention_mask, MaskPattern):
        raise ModelError(
            f"{name} builds its attention mask in its own way, so strided EBFT cannot tell which keys a query sees. "
            "Use `ebft.mode: structured` for this model"
        )
    known = _HONOURED | _REDUNDANT | _REPORTING
    unknown = sorted(k for k, v in kwargs.items() if k not in known and v is not None)
    if unknown:
        raise ModelError(
            f"{name} passes {', '.join(unknown)} to attention, which strided EBFT does not know how to honour. "
            "Use `ebft.mode: structured` for this model"
        )
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ModelError(f"{name} is not causal; EBFT samples from causal language models only")


def _mask_pattern(batch_size, q_length, kv_length, *args, mask_function=causal_mask_function, **kwargs):
    """The mask interface of transformers: hand the pattern itself to attention instead of a tensor."""
    return MaskPattern(mask_function)


AttentionInterface.register(IMPLEMENTATION, strided_attention)
AttentionMaskInterface.register(IMPLEMENTATION, _mask_pattern)
