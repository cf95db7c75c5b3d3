"""Attention over [documents | rollouts]: every rollout token attends to its document prefix and to its own block.

Registered with transformers as the attention implementation "ebft_strided". A forward pass with a `StridedPass` in
its keyword arguments uses `strided_attention` below. The `StridedPass` defines the phase of a step (prefill, decode
or score) and stores the data of that phase. No (S + rollouts)^2 mask is built: adjacent queries form a tile, which
reads only the keys that any of them attends to.

    S  document tokens of the batch     M  blocks     N  rollouts per block     T  rollout tokens (queries)
    H  query heads    K  key/value heads     Q = H / K        D  head dimension         U  own rollout keys
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from ebft.errors import ModelError
from ebft.over_transformers import causal_mask_function
from ebft.strided.attention import flex
from ebft.strided.attention.stacks import Stack, stack_up
from ebft.strided.attention.tiles import Own, Scores, Tile, attend
from ebft.strided.layout import StridedLayout

IMPLEMENTATION = "ebft_strided"

# Query rows per tile (query heads that share a key head count separately): large enough for efficient matrix products,
# small enough that the scores fit in the processor's cache and few of the keys are masked.
_ROWS_PER_TILE = {"cpu": 256, "other": 4096}

# Maximum number of tokens of documents whose attention is computed in stacked tiles.
_SHORT = 256

# Keyword arguments that attention layers may receive besides query, key and value. Those in _HONOURED are supported
# below, those in _REDUNDANT repeat information of the query, key and mask, and those in _REPORTING do not affect the
# scores. Any other argument may change the scores and is rejected.
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


@dataclass(eq=False)
class MaskPattern:
    """A model's attention pattern (causal, sliding window, chunked) as a function of query and key positions.

    A forward pass creates one instance for all layers that share the pattern, so the tiles are cached here.
    """

    function: Callable
    _kept: dict = field(default_factory=dict)

    @property
    def is_causal(self) -> bool:
        return self.function is causal_mask_function

    def allowed(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        """Return whether queries may attend to keys, by position; the arguments are broadcast, the result is bool."""
        if self.is_causal:
            return key_position <= query_position
        zero = torch.zeros((), dtype=torch.long, device=key_position.device)
        return self.function(zero, zero, query_position, key_position)

    def document_tiles(self, layout: StridedLayout, heads: int, key_heads: int | None) -> list[Tile | Stack]:
        """Return the tiles of the document tokens, `heads` rows per token, stacked for `key_heads` key heads."""
        make = lambda: stack_up(list(self._document_tiles(layout, heads)), key_heads)
        return self._keep(("document", heads, key_heads), make)

    def rollout_tiles(self, run: StridedPass, heads: int, key_heads: int | None) -> list[Tile | Stack]:
        """Return the tiles of a pass's rollout tokens and their documents' keys, block by block, possibly stacked."""
        make = lambda: stack_up(list(self._rollout_tiles(run, heads)), key_heads)
        return self._keep(("rollout", heads, key_heads), make)

    def own_hidden(self, run: StridedPass, heads: int, num_keys: int) -> Tensor:
        """Return the mask of a rollout token's own keys that are later or masked by the pattern: (M, N, heads * T, U).

        Masked keys are True.
        """
        return self._keep(("own", heads, num_keys), lambda: self._own_hidden(run, heads, num_keys))

    def flex_mask(self, run: StridedPass):
        """Return the complete mask of a scoring pass for flex_attention."""
        return self._keep("flex", lambda: flex.layout_mask(run.layout, run.document_positions, run.steps, self))

    def _keep(self, name: tuple | str, make: Callable):
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def _document_tiles(self, layout: StridedLayout, heads: int):
        size = max(1, _rows_per_tile(layout.device) // heads)
        for start, end in layout.spans:
            for first in range(0, end - start, size):
                last = min(first + size, end - start)
                position = torch.arange(first, last, device=layout.device)
                yield self._tile(position, heads, start + first, (start, last), first)

    def _rollout_tiles(self, run: StridedPass, heads: int):
        layout, n, t = run.layout, run.layout.num_samples, run.steps
        size = max(1, _rows_per_tile(layout.device) // (n * heads * t))
        step = torch.arange(run.first_step, run.first_step + t, device=layout.device)
        block = 0
        for (start, _), anchors in zip(layout.spans, layout.anchors):
            for first in range(0, len(anchors), size):
                chunk = anchors[first : first + size]
                position = torch.tensor(chunk, device=layout.device)[:, None, None, None] + step
                position = position.expand(-1, n, heads, -1).flatten()
                # The prefix ends at the block's anchor, whatever the query's position in the block.
                limit = (position.view(len(chunk), -1, t) - step).flatten()
                yield self._tile(position, 1, (block + first) * n * heads * t, (start, chunk[-1]), chunk[0], limit)
            block += len(anchors)

    def _tile(self, position, heads, first_row, document, causal_from, limit=None) -> Tile:
        """Return the tile of rows at `position`, each `heads` times, with the document keys that any row attends to.

        document: its start among the S tokens, and the number of its keys to consider.
        """
        start, length = document
        begin = causal_from if self.is_causal else 0  # all causal rows attend to all keys before the first row's
        key = torch.arange(begin, length, device=position.device)
        seen = self.allowed(position[:, None], key)
        if limit is not None:
            seen &= key < limit[:, None]
        skipped = 0
        if not self.is_causal:  # a window may exclude the start of the document
            any_seen = seen.any(0)
            skipped = int(any_seen.int().argmax()) if any_seen.any() else length
        hidden = ~seen[:, skipped:].repeat_interleave(heads, dim=0)
        rows = slice(first_row * heads, first_row * heads + len(hidden))
        return Tile(rows, slice(start + skipped, start + length), hidden)

    def _own_hidden(self, run: StridedPass, heads: int, num_keys: int) -> Tensor:
        anchors = run.layout.block_anchors[:, None, None]
        step = torch.arange(run.first_step, run.first_step + run.steps, device=anchors.device)[:, None]
        key_step = torch.arange(num_keys, device=anchors.device)
        hidden = (key_step > step) | ~self.allowed(anchors + step, anchors + key_step)  # (M, T, U)
        return hidden[:, None, None].expand(-1, run.layout.num_samples, heads, -1, -1).flatten(2, 3)


def _rows_per_tile(device: torch.device) -> int:
    return _ROWS_PER_TILE["cpu" if device.type == "cpu" else "other"]


@dataclass
class StridedPass:
    """One forward pass over a layout. `cache` maps each layer to the keys and values of documents and rollouts.

    phase "prefill": documents only; their keys and values are stored in the cache.
    phase "decode":  one token (step `first_step`) of every rollout; its key and value are appended to the cache.
    phase "score":   [documents | rollout tokens 0..steps) in a single pass, with gradients if enabled.

    `recording` is entered as a context manager while the layers run, to record or replay their matrix products.
    """

    layout: StridedLayout
    phase: str
    document_positions: Tensor
    steps: int = 0
    first_step: int = 0
    cache: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    apply_dropout: bool = False
    recording: AbstractContextManager | None = None
    layers_seen: set[int] = field(default_factory=set)
    previous_implementation: list[str] = field(default_factory=list)

    @property
    def wants_flex(self) -> bool:
        """Whether the model was loaded with flex_attention, which it uses outside of strided passes."""
        return self.previous_implementation[0] == "flex_attention"

    def position_ids(self) -> Tensor:
        """Return the positions of the tokens of this pass: (1, tokens)."""
        if self.phase == "prefill":
            return self.document_positions[None]
        rollout = self.layout.rollout_positions(self.first_step, self.steps)
        return (rollout if self.phase == "decode" else torch.cat([self.document_positions, rollout]))[None]


def strided_attention(module, query, key, value, attention_mask, **kwargs):
    """The attention function that transformers calls in every layer.

    query (1, H, tokens, D), key and value (1, K, tokens, D) -> (1, tokens, H, D), None. Raises ModelError if the layer
    is not supported.
    """
    run: StridedPass | None = kwargs.get("strided")
    if run is None:
        raise ModelError(
            f"{type(module).__name__} does not forward keyword arguments to its attention function, which strided EBFT "
            "requires to share a document prefix between rollouts. Use `ebft.mode: structured` for this model"
        )
    _check_supported(module, attention_mask, kwargs)
    layer = id(module)
    run.layers_seen.add(layer)
    scores = Scores(
        scaling=kwargs["scaling"] if kwargs.get("scaling") is not None else query.shape[-1] ** -0.5,
        softcap=kwargs.get("softcap"),
        dropout=(kwargs.get("dropout") or 0.0) if run.apply_dropout else 0.0,
    )
    sinks, pattern = kwargs.get("s_aux"), attention_mask
    if run.phase == "score" and run.wants_flex and flex.available(query.device) and not scores.dropout:
        mask = pattern.flex_mask(run)
        return flex.attend_all(query, key, value, mask, scores, sinks)[None], None
    query = query[0].unflatten(0, (key.shape[1], -1))  # (K, Q, tokens, D)
    key, value = key[0], value[0]
    if run.phase == "decode":
        document, own = _cached(run, layer, key, value)
        output = _rollout_attention(run, query, document, own, pattern, scores, sinks)
    elif run.phase == "prefill":
        run.cache[layer] = (key, value)
        output = _document_attention(run, query, key, value, pattern, scores, sinks)
    else:
        s = len(run.document_positions)
        document = key[:, :s], value[:, :s]
        output = _document_attention(run, query[:, :, :s], *document, pattern, scores, sinks)
        if run.steps:  # rollouts of one token are scored from the document's states
            own = tuple(x[:, s:].unflatten(1, (-1, run.steps)) for x in (key, value))  # (K, M * N, T, D)
            output = torch.cat(
                [output, _rollout_attention(run, query[:, :, s:], document, own, pattern, scores, sinks)]
            )
    return output[None], None


def _cached(run, layer, key, value):
    """Append the newest rollout tokens to the cache and return the cached keys and values.

    Returns those of the documents, (K, S, D), and those of the rollouts, (K, M * N, U, D).
    """
    document_key, document_value, *own = run.cache[layer]
    newest = (key.unsqueeze(2), value.unsqueeze(2))
    own = tuple(torch.cat(pair, 2) for pair in zip(own, newest)) if own else newest
    run.cache[layer] = (document_key, document_value, *own)
    return (document_key, document_value), own


def _document_attention(run, query, key, value, pattern, scores, sinks) -> Tensor:
    """Compute causal attention within each document: query (K, Q, S, D) -> (S, H, D)."""
    k, q, s, d = query.shape
    if _is_plain(pattern, scores, sinks) and not _are_short(run.layout, scores):
        documents = []
        for start, end in run.layout.spans:
            part = F.scaled_dot_product_attention(
                query[:, :, start:end].flatten(0, 1)[None],
                key[None, :, start:end],
                value[None, :, start:end],
                dropout_p=scores.dropout,
                is_causal=True,
                scale=scores.scaling,
                enable_gqa=q > 1,
            )
            documents.append(part[0].transpose(0, 1))
        return torch.cat(documents)
    rows = query.transpose(1, 2).reshape(k, s * q, d)
    tiles = pattern.document_tiles(run.layout, q, _stacked(k, sinks))
    output = attend(rows, key, value, None, tiles, scores, _sink_rows(sinks, k, q, 1))
    return output.view(k, s, q, -1).transpose(0, 1).flatten(1, 2)


def _rollout_attention(run, query, document, own, pattern, scores, sinks) -> Tensor:
    """Compute attention of rollout tokens to their document prefix and to their own block.

    query (K, Q, M * N * T, D); document: key and value (K, S, D); own: key and value (K, M * N, U, D), where U >= T
    and the last T keys belong to the queries. Returns (M * N * T, H, D).
    """
    k, q, _, d = query.shape
    t = run.steps
    rows = query.unflatten(2, (-1, t)).transpose(1, 2).reshape(k, -1, d)  # (K, M * N * Q * T, D)
    hidden = pattern.own_hidden(run, q, own[0].shape[2]).flatten(0, 1)
    tiles = pattern.rollout_tiles(run, q, _stacked(k, sinks))
    output = attend(rows, *document, Own(*own, hidden), tiles, scores, _sink_rows(sinks, k, q, t))
    return output.view(k, -1, q, t, output.shape[-1]).permute(1, 3, 0, 2, 4).flatten(0, 1).flatten(1, 2)


def _is_plain(pattern, scores, sinks) -> bool:
    """Whether scaled_dot_product_attention supports the pattern and scores."""
    return pattern.is_causal and scores.softcap is None and sinks is None


def _are_short(layout: StridedLayout, scores: Scores) -> bool:
    """Whether there are several short documents on CPU, for which stacked tiles are faster than a kernel for each."""
    longest = max(end - start for start, end in layout.spans)
    return layout.device.type == "cpu" and len(layout.spans) > 1 and longest <= _SHORT and not scores.dropout


def _stacked(key_heads: int, sinks: Tensor | None) -> int | None:
    """Return the number of key heads for stacking tiles, or None with sinks, which prevent stacking.

    Sinks repeat along the rows of a tile.
    """
    return key_heads if sinks is None else None


def _sink_rows(sinks: Tensor | None, k: int, q: int, t: int) -> Tensor | None:
    """Expand the learned sinks (H,) to the Q * T rows that repeat along a layout: (K, Q * T)."""
    return None if sinks is None else sinks.view(k, q, 1).expand(-1, -1, t).flatten(1)


def _check_supported(module, attention_mask, kwargs) -> None:
    """Raise ModelError, naming the feature, if strided scores would differ from those of the model."""
    name = type(module).__name__
    if not isinstance(attention_mask, MaskPattern):
        raise ModelError(
            f"{name} does not build its attention mask with the mask interface of transformers, so strided EBFT cannot "
            "determine which keys a query attends to. Use `ebft.mode: structured` for this model"
        )
    known = _HONOURED | _REDUNDANT | _REPORTING
    unknown = sorted(k for k, v in kwargs.items() if k not in known and v is not None)
    if unknown:
        raise ModelError(
            f"{name} passes {', '.join(unknown)} to its attention function, which strided EBFT does not support. "
            "Use `ebft.mode: structured` for this model"
        )
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ModelError(f"{name} does not use causal attention, but EBFT supports only causal language models")


def _mask_pattern(batch_size, q_length, kv_length, *args, mask_function=causal_mask_function, **kwargs):
    """Mask function for transformers that passes the pattern itself to attention instead of a mask tensor."""
    return MaskPattern(mask_function)


AttentionInterface.register(IMPLEMENTATION, strided_attention)
AttentionMaskInterface.register(IMPLEMENTATION, _mask_pattern)
