"""Attention of the scoring pass with PyTorch's flex_attention: one fused kernel for documents and rollouts, on GPUs.

Used if the model was loaded with `attn_implementation="flex_attention"` and runs on a GPU. tiles.py is the reference
implementation.

    X  tokens of the pass, [documents | rollouts]    H  query heads    K  key/value heads    D  head dimension
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from ebft.strided.attention.tiles import Scores
from ebft.strided.layout import StridedLayout


def available(device: torch.device) -> bool:
    """Whether flex_attention can be compiled for `device`; uncompiled, it materialises all scores at once."""
    return device.type == "cuda"


def attend_all(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scores: Scores, sinks: Tensor | None
) -> Tensor:
    """Compute attention of query (1, H, X, D) to key and value (1, K, X, D) with the layout's mask: (X, H, D)."""
    query, key = query.to(value.dtype), key.to(value.dtype)

    def capped(score, batch, head, query_index, key_index):
        return scores.softcap * torch.tanh(score / scores.softcap)

    output = _kernel(query.is_cuda)(
        query,
        key,
        value,
        score_mod=None if scores.softcap is None else capped,
        block_mask=mask,
        scale=scores.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is not None:
        # A sink adds a term to the softmax denominator: out * exp(lse) / (exp(lse) + exp(sink)).
        output, rest = output
        output = output * torch.sigmoid(rest.lse - sinks[:, None]).unsqueeze(-1).to(output.dtype)
    return output[0].transpose(0, 1)


def layout_mask(layout: StridedLayout, document_positions: Tensor, steps: int, pattern) -> BlockMask:
    """Return the mask of the X keys that each of the X queries attends to, shared by all heads.

    Everything that changes between batches is captured as tensors, so that a new layout does not recompile the kernel.
    """
    device, s = layout.device, len(document_positions)
    lengths = torch.tensor([end - start for start, end in layout.spans], device=device)
    blocks = torch.tensor([len(row) for row in layout.anchors], device=device)
    per_block = layout.num_samples * steps
    number = torch.arange(len(lengths), device=device)
    position = torch.cat([document_positions, layout.rollout_positions(0, steps)])
    document = torch.cat([number.repeat_interleave(lengths), number.repeat_interleave(blocks * per_block)])
    rollouts = torch.arange(layout.num_blocks * layout.num_samples, device=device).repeat_interleave(steps)
    owner = torch.cat([torch.full((s,), -1, device=device), rollouts])
    # A rollout attends to its document up to its anchor, a document token up to its own position.
    limit = torch.cat([document_positions + 1, layout.block_anchors.repeat_interleave(per_block)])

    def seen(batch, head, query, key):
        prefix = (owner[key] < 0) & (document[key] == document[query]) & (position[key] < limit[query])
        own = (owner[key] >= 0) & (owner[key] == owner[query]) & (position[key] <= position[query])
        return (prefix | own) & pattern.allowed(position[query], position[key])

    x = len(position)
    return create_block_mask(
        seen, B=None, H=None, Q_LEN=x, KV_LEN=x, device=str(device), _compile=device.type == "cuda"
    )


@cache
def _kernel(compiled: bool):
    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention
