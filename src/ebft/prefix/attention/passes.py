"""The attention function of forward passes in which sequences share a prefix, and the passes' interface.

Registered with transformers as the attention implementation "ebft_prefix". A forward pass with a `PrefixPass` in its
keyword arguments uses `prefix_attention` below, which leaves the attention to the pass. No mask of all tokens by all
tokens is built.

    S  tokens of shared documents    H  query heads    K  key/value heads    Q = H / K    D  head dimension
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from ebft.errors import ModelError
from ebft.prefix.attention import flex
from ebft.prefix.attention.batches import MOST_PADDING, DocumentBatch, Spans, grouped
from ebft.prefix.attention.tiles import MOST_SCORES, AttentionScores, BatchedTiles, Tile, attend, batch_tiles
from ebft.prefix.sampling import of_device
from ebft.transformers_internals import causal_mask_function

Call = tuple[int, int]  # the id of a layer, and the number of its previous calls in the same pass

IMPLEMENTATION = "ebft_prefix"
HINT = "Use `ebft.mode: structured` for this model"  # appended to errors about models that are not supported

# Query rows per tile (query heads that share a key head count separately): large enough for efficient matrix products,
# small enough that the scores fit in the processor's cache and few of the keys are masked.
_ROWS_PER_TILE = {"cpu": 256, "other": 16384}

# Keyword arguments that attention layers may receive besides query, key and value. Those in _HONOURED are supported
# below, those in _REDUNDANT repeat information of the query, key and mask, and those in _REPORTING do not affect the
# scores. Any other argument may change the scores and is rejected.
_HONOURED = {"scaling", "dropout", "softcap", "s_aux", "prefix_pass"}
_REDUNDANT = {"sliding_window", "position_ids", "cache_position", "is_causal", "use_cache", "position_embeddings"}
_REPORTING = {
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch"),
    *("logits_to_keep", "past_key_values", "past_key_value", "layer_idx", "deterministic"),
}


_running: ContextVar[Callable[[], PrefixPass] | None] = ContextVar("running pass", default=None)


@dataclass(eq=False)
class MaskPattern:
    """A model's attention pattern (causal, sliding window, chunked) as a function of query and key positions.

    A forward pass creates one instance for all layers that share the pattern, so the tiles are cached here.
    `find_pass` returns that pass, for layers that receive no other keyword arguments than the mask.
    """

    function: Callable
    find_pass: Callable[[], PrefixPass] | None = None
    _kept: dict = field(default_factory=dict)

    ndim = 0  # models that check the shape of a mask, or convert it, leave the pattern as it is

    def to(self, *args) -> MaskPattern:
        return self

    def __getitem__(self, index: tuple[slice, ...]) -> MaskPattern:
        """Return the pattern of all queries and keys, of one head or all, which Gemma 4 and indexers take."""
        if any(each not in (0, slice(None), slice(0, None)) for each in index):
            raise NotImplementedError(f"a part of the attention mask, {index}")
        return self

    @property
    def is_causal(self) -> bool:
        return self.function is causal_mask_function

    def allowed(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        """Return whether queries may attend to keys, by position; the arguments are broadcast, the result is bool."""
        if self.is_causal:
            return key_position <= query_position
        zero = torch.zeros((), dtype=torch.long, device=key_position.device)
        return self.function(zero, zero, query_position, key_position)

    def document_tiles(
        self, spans: Spans, heads: int, key_heads: int, batches: bool, device: torch.device
    ) -> list[Tile | BatchedTiles]:
        """Return the tiles of the document tokens, `heads` rows per token, for `key_heads` key heads.

        With `batches`, small tiles are batched; not for sinks, which repeat along the rows of a tile.
        """

        def make() -> list[Tile | BatchedTiles]:
            longest = max(end - start for start, end in spans)
            size, tiles = max(1, rows_per_tile(device, key_heads, longest) // heads), []
            for start, end in spans:
                for first in range(0, end - start, size):
                    position = torch.arange(first, min(first + size, end - start), device=device)
                    tiles.append(self.tile(position, heads, start + first, (start, first + len(position)), first))
            return batch_tiles(tiles, key_heads) if batches else tiles

        return self.keep(("document", heads, key_heads, batches), make)

    def keep(self, name: tuple | str, make: Callable):
        """Return what `make` returned for this name in this forward pass, called once."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def tile(self, position, heads, first_row, document, causal_from, limit=None) -> Tile:
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


def rows_per_tile(device: torch.device, key_heads: int, num_keys: int) -> int:
    """Return the number of query rows of a tile with at most `num_keys` keys in each of `key_heads` heads."""
    most = of_device(_ROWS_PER_TILE, device)
    return most if device.type == "cpu" else min(most, max(256, MOST_SCORES["other"] // (key_heads * max(num_keys, 1))))


@dataclass(kw_only=True)
class PrefixPass(ABC):
    """One forward pass; `cache` maps each call of the attention function to keys and values that later passes read.

    A call is given by its layer and its number among the calls of this layer: a model may make several.
    `reuse` is entered as a context manager while the layers run, to keep or reuse their products, see `prefix.cpu`.
    """

    cache: dict[Call, tuple[Tensor, ...]] = field(default_factory=dict)
    apply_dropout: bool = False
    reuse: AbstractContextManager | None = None
    calls: dict[int, int] = field(default_factory=dict)  # number of calls of each layer so far
    places: tuple[Tensor, Tensor] | None = None  # row and column of each token, if sequences are run as rows
    previous_implementation: list[str] = field(default_factory=list)

    @abstractmethod
    def position_ids(self) -> Tensor:
        """Return the positions of the tokens of this pass: (1, tokens)."""

    @abstractmethod
    def attend(self, call, query, key, value, pattern, scores, sinks) -> Tensor:
        """Compute one call's attention: query (K, Q, tokens, D), key and value (K, tokens, D) -> (tokens, H, D)."""

    def advance(self, call: Call, layer: Any, hidden: Tensor) -> Tensor:
        """Compute one call of a layer with a running state: hidden states (1, tokens, D) -> (1, tokens, D)."""
        raise ModelError(f"passes of this kind do not share running states. {HINT}")

    def rows(self, tokens: Tensor) -> Tensor | None:
        """Return the sequences of the tokens (P,) as rows of their own, (B, L), padded on the right, and set `places`;
        None if passes of this kind are not run so."""
        return None

    def of_tokens(self, states: Tensor) -> Tensor:
        """Return the states (P, D) of the tokens, from states of the pass (1, P, D) or of its rows (B, L, D)."""
        return states.squeeze(0) if self.places is None else states[self.places]

    def number(self, module: Any) -> Call:
        """Count a call of a layer."""
        call = id(module), self.calls.get(id(module), 0)
        self.calls[id(module)] = call[1] + 1
        return call

    def tokens(self) -> flex.Visibility | None:
        """Return what the tokens may attend to, if flex_attention can compute the entire pass."""
        return None

    def flex_mask(self, pattern: MaskPattern, device: torch.device):
        """Return the mask for flex_attention, or None if it is not used."""
        # The model was loaded with that implementation, which it uses outside of these passes.
        # The list is empty in backward, where layers without a `config` (see attention_adapters.py) are recomputed.
        if "flex_attention" not in self.previous_implementation[:1] or not flex.available(device):
            return None
        tokens = self.tokens()
        return None if tokens is None else pattern.keep("flex", lambda: flex.pass_mask(tokens, pattern))


@contextmanager
def running(run: PrefixPass) -> Iterator[None]:
    """Context manager in which the masks that a model builds belong to the pass."""
    token = _running.set(lambda: run)
    try:
        yield
    finally:
        _running.reset(token)


def current_pass() -> PrefixPass | None:
    """Return the pass that is running; None in backward, where layers are recomputed."""
    found = _running.get()
    return None if found is None else found()


def pass_in(kwargs: dict[str, Any]) -> PrefixPass | None:
    """Return the pass that a module's keyword arguments name, or else the pass of its mask; None outside of passes.

    Both are functions without parameters that return the pass: with mixed precision, FSDP2 makes copies of dataclasses
    among the arguments of layers, to cast tensors in them.
    """
    found, mask = kwargs.get("prefix_pass"), kwargs.get("attention_mask")
    if found is None and isinstance(mask, MaskPattern):
        found = mask.find_pass
    return None if found is None else found()


def prefix_attention(module, query, key, value, attention_mask, **kwargs):
    """The attention function that transformers calls in every layer.

    query (1, H, tokens, D), key and value (1, K, tokens, D) -> (1, tokens, H, D), None. Raises ModelError if the layer
    is not supported.
    """
    run = pass_in({**kwargs, "attention_mask": attention_mask})
    if run is None:
        raise ModelError(f"{type(module).__name__} passes no keyword arguments to its attention function. {HINT}")
    _check_supported(module, attention_mask, kwargs)
    call = run.number(module)
    scores = AttentionScores(
        scaling=kwargs["scaling"] if kwargs.get("scaling") is not None else query.shape[-1] ** -0.5,
        softcap=kwargs.get("softcap"),
        dropout=(kwargs.get("dropout") or 0.0) if run.apply_dropout else 0.0,
    )
    sinks, pattern = kwargs.get("s_aux"), attention_mask
    mask = None if scores.dropout else run.flex_mask(pattern, query.device)
    if mask is not None:
        return flex.attend_all(query, key, value, mask, scores, sinks)[None], None
    # Squeezed rather than indexed, whose gradient would be copied into zeros.
    query, key, value = query.squeeze(0).unflatten(0, (key.shape[1], -1)), key.squeeze(0), value.squeeze(0)
    # Linear layers alone are reused, so the functions in here need not be intercepted.
    with nullcontext() if run.reuse is None else torch._C.DisableTorchFunction():
        output = run.attend(call, query, key, value, pattern, scores, sinks)  # query (K, Q, tokens, D)
    return output.contiguous()[None], None  # as the functions of transformers return it; some models view it


def document_attention(spans: Spans, query, key, value, pattern, scores, sinks) -> Tensor:
    """Compute causal attention within each document: query (K, Q, S, D) -> (S, H, D)."""
    k, q, s, d = query.shape
    if pattern.is_causal and scores.softcap is None and sinks is None:  # scaled_dot_product_attention supports these
        query, key = query.to(value.dtype), key.to(value.dtype)  # with autocast, float32 after the rotary embedding
        batches = pattern.keep("documents", lambda: document_batches(spans, query.device))
        sizes = [sum(batch.lengths) for batch in batches]
        whole, documents = (query.flatten(0, 1), key, value), []
        # Split rather than sliced, whose gradients would be as many tensors, padded with zeros.
        parts = (whole,) if len(batches) == 1 else zip(*(x.split(sizes, 1) for x in whole))
        for batch, part in zip(batches, parts):
            of_query, of_key, of_value = (batch.of(x).transpose(0, 1) for x in part)  # (G, H or K, P, D)
            if q > 1 and not takes_grouped_heads(of_query, of_key, of_value, scores.dropout):  # else P x P scores
                of_key, of_value = (x.repeat_interleave(q, 1) for x in (of_key, of_value))
            gqa = of_query.shape[1] != of_key.shape[1]
            output = F.scaled_dot_product_attention(
                of_query, of_key, of_value, None, scores.dropout, is_causal=True, scale=scores.scaling, enable_gqa=gqa
            )
            documents.append(batch.in_order(output.transpose(1, 2), 0))
        return documents[0] if len(documents) == 1 else torch.cat(documents)
    rows = query.transpose(1, 2).reshape(k, s * q, d)
    tiles = pattern.document_tiles(spans, q, k, sinks is None, query.device)
    output = attend(rows, key, value, None, tiles, scores, sink_rows(sinks, k, q, 1))
    return output.view(k, s, q, -1).transpose(0, 1).flatten(1, 2)


def document_batches(spans: Spans, device: torch.device) -> list[DocumentBatch]:
    """Return adjacent documents whose attention is computed at once, with spans among the tokens of their batch."""

    def fit(group: Spans) -> bool:
        sizes = [(end - start) ** 2 for start, end in group]
        return len(group) * max(sizes) <= of_device(MOST_PADDING, device) * sum(sizes)

    groups = grouped(spans, fit)
    return [DocumentBatch([(a - group[0][0], b - group[0][0]) for a, b in group], device) for group in groups]


def takes_grouped_heads(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether a fused kernel takes several query heads for a key head: FlashAttention on a GPU, or on a planned one."""
    if query.is_cuda:
        return can_use_flash_attention(SDPAParams(query, key, value, None, dropout, True, True))
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return query.device.type == "cpu" or (is_half and query.shape[-1] == value.shape[-1] <= 256)


def sink_rows(sinks: Tensor | None, k: int, q: int, t: int) -> Tensor | None:
    """Expand the learned sinks (H,) to the Q * T rows that repeat along a layout: (K, Q * T)."""
    return None if sinks is None else sinks.view(k, q, 1).expand(-1, -1, t).flatten(1)


def _check_supported(module, attention_mask, kwargs) -> None:
    """Raise ModelError, naming the feature, if strided scores would differ from the model's."""
    known, problem = _HONOURED | _REDUNDANT | _REPORTING, None
    unknown = sorted(k for k, v in kwargs.items() if k not in known and v is not None)
    if not isinstance(attention_mask, MaskPattern):
        problem = (
            "does not build its attention mask with the mask interface of transformers, so strided EBFT cannot "
            "determine which keys a query attends to"
        )
    elif unknown:
        problem = f"passes {', '.join(unknown)} to its attention function, which strided EBFT does not support"
    elif kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        problem = "does not use causal attention, but EBFT supports only causal language models"
    if problem:
        raise ModelError(f"{type(module).__name__} {problem}. {HINT}")


AttentionInterface.register(IMPLEMENTATION, prefix_attention)
# So that transformers passes the pattern itself to attention instead of a mask tensor.
AttentionMaskInterface.register(
    IMPLEMENTATION,
    lambda *args, mask_function=causal_mask_function, **kwargs: MaskPattern(mask_function, _running.get()),
)
