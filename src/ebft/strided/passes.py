"""Passes over [documents | rollouts]: every rollout token attends to its document prefix and to its own block.

S  document tokens of the batch     M  blocks     N  rollouts per block     T  rollout tokens (queries)
H  query heads    K  key/value heads     Q = H / K        D  head dimension         U  own rollout keys
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ebft.prefix.attention import MaskPattern, PrefixPass, Tokens, document_attention
from ebft.prefix.attention.passes import rows_per_tile, sink_rows, stacked
from ebft.prefix.attention.stacks import stack_up
from ebft.prefix.attention.tiles import Own, Tile, attend
from ebft.strided.layout import StridedLayout


@dataclass
class StridedPass(PrefixPass):
    """One forward pass over a layout, of one of three kinds.

    phase "prefill": documents only; their keys and values are stored in the cache.
    phase "decode":  one token (step `first_step`) of every rollout; its key and value are appended to the cache.
    phase "score":   [documents | rollout tokens 0..steps) in a single pass, with gradients if enabled.
    """

    layout: StridedLayout
    phase: str
    document_positions: Tensor
    steps: int = 0
    first_step: int = 0

    def position_ids(self) -> Tensor:
        if self.phase == "prefill":
            return self.document_positions[None]
        rollout = self.layout.rollout_positions(self.first_step, self.steps)
        return (rollout if self.phase == "decode" else torch.cat([self.document_positions, rollout]))[None]

    def tokens(self) -> Tokens | None:
        if self.phase != "score":
            return None
        layout = self.layout
        blocks = torch.tensor([len(row) for row in layout.anchors], device=layout.device)
        per_block = layout.num_samples * self.steps
        owner = torch.arange(layout.num_blocks * layout.num_samples, device=layout.device)
        return Tokens.of(
            layout.spans,
            self.position_ids()[0],
            document=torch.arange(len(blocks), device=layout.device).repeat_interleave(blocks * per_block),
            owner=owner.repeat_interleave(self.steps),
            prefix=layout.block_anchors.repeat_interleave(per_block),
        )

    def attend(self, layer, query, key, value, pattern, scores, sinks) -> Tensor:
        if self.phase == "decode":
            document, own = _cached(self, layer, key, value)
            return _rollout_attention(self, query, document, own, pattern, scores, sinks)
        if self.phase == "prefill":
            self.cache[layer] = (key, value)
            return document_attention(self.layout.spans, query, key, value, pattern, scores, sinks)
        s = len(self.document_positions)
        document = key[:, :s], value[:, :s]
        output = document_attention(self.layout.spans, query[:, :, :s], *document, pattern, scores, sinks)
        if not self.steps:  # rollouts of one token are scored from the document's states
            return output
        own = tuple(x[:, s:].unflatten(1, (-1, self.steps)) for x in (key, value))  # (K, M * N, T, D)
        rollout = _rollout_attention(self, query[:, :, s:], document, own, pattern, scores, sinks)
        return torch.cat([output, rollout])


def _cached(run, layer, key, value):
    """Append the newest rollout tokens to the cache and return the cached keys and values.

    Returns those of the documents, (K, S, D), and those of the rollouts, (K, M * N, U, D).
    """
    document_key, document_value, *own = run.cache[layer]
    newest = (key.unsqueeze(2), value.unsqueeze(2))
    own = tuple(torch.cat(pair, 2) for pair in zip(own, newest)) if own else newest
    run.cache[layer] = (document_key, document_value, *own)
    return (document_key, document_value), own


def _rollout_attention(run, query, document, own, pattern, scores, sinks) -> Tensor:
    """Compute attention of rollout tokens to their document prefix and to their own block.

    query (K, Q, M * N * T, D); document: key and value (K, S, D); own: key and value (K, M * N, U, D), where U >= T
    and the last T keys belong to the queries. Returns (M * N * T, H, D).
    """
    k, q, _, d = query.shape
    t, u = run.steps, own[0].shape[2]
    rows = query.unflatten(2, (-1, t)).transpose(1, 2).reshape(k, -1, d)  # (K, M * N * Q * T, D)
    hidden = pattern.keep(("own", q, u), lambda: _own_hidden(run, pattern, q, u)).flatten(0, 1)
    tiles = pattern.keep(("rollout", q, k), lambda: stack_up(list(_rollout_tiles(run, pattern, q)), stacked(k, sinks)))
    output = attend(rows, *document, Own(*own, hidden), tiles, scores, sink_rows(sinks, k, q, t))
    return output.view(k, -1, q, t, output.shape[-1]).permute(1, 3, 0, 2, 4).flatten(0, 1).flatten(1, 2)


def _rollout_tiles(run: StridedPass, pattern: MaskPattern, heads: int) -> Iterator[Tile]:
    """Return the tiles of a pass's rollout tokens and their documents' keys, block by block."""
    layout, n, t = run.layout, run.layout.num_samples, run.steps
    size = max(1, rows_per_tile(layout.device) // (n * heads * t))
    step = torch.arange(run.first_step, run.first_step + t, device=layout.device)
    block = 0
    for (start, _), anchors in zip(layout.spans, layout.anchors):
        for first in range(0, len(anchors), size):
            chunk = anchors[first : first + size]
            position = torch.tensor(chunk, device=layout.device)[:, None, None, None] + step
            position = position.expand(-1, n, heads, -1).flatten()
            # The prefix ends at the block's anchor, whatever the query's position in the block.
            limit = (position.view(len(chunk), -1, t) - step).flatten()
            yield pattern.tile(position, 1, (block + first) * n * heads * t, (start, chunk[-1]), chunk[0], limit)
        block += len(anchors)


def _own_hidden(run: StridedPass, pattern: MaskPattern, heads: int, num_keys: int) -> Tensor:
    """Return the mask of a rollout token's own keys that are later or masked by the pattern: (M, N, heads * T, U).

    Masked keys are True.
    """
    anchors = run.layout.block_anchors[:, None, None]
    step = torch.arange(run.first_step, run.first_step + run.steps, device=anchors.device)[:, None]
    key_step = torch.arange(num_keys, device=anchors.device)
    hidden = (key_step > step) | ~pattern.allowed(anchors + step, anchors + key_step)  # (M, T, U)
    return hidden[:, None, None].expand(-1, run.layout.num_samples, heads, -1, -1).flatten(2, 3)
