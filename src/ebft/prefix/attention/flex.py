"""Attention of the scoring pass with PyTorch's flex_attention: one fused kernel for documents and rollouts, on GPUs.

Used if the model was loaded with `attn_implementation="flex_attention"` and runs on a GPU. tiles.py is the reference
implementation.

    X  tokens of the pass, [documents | rollouts]    H  query heads    K  key/value heads    D  head dimension
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from ebft.machine import copy_to
from ebft.prefix.attention.tiles import AttentionScores


def available(device: torch.device) -> bool:
    """Whether flex_attention can be compiled for `device`; uncompiled, it materialises all scores at once."""
    return device.type == "cuda"


def attend_all(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scores: AttentionScores, sinks: Tensor | None
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


@dataclass(frozen=True)
class Visibility:
    """What each token of a pass [documents | rollouts] may attend to, all (X,) long.

    A token attends to the first `limit` tokens of its document, and to earlier tokens of its own rollout. `owner` is
    the number of the rollout, -1 for document tokens. If rollouts are trees (ebft/strided/passes.py), `owner` is the
    number of the node, `step` (X,) its position in a rollout, and path (C + 1, U) the nodes up to it; the last
    row is for documents.
    """

    position: Tensor
    document: Tensor
    owner: Tensor
    limit: Tensor
    step: Tensor | None = None
    path: Tensor | None = None

    @classmethod
    def of(
        cls,
        spans: list[tuple[int, int]],
        position: Tensor,
        document: Tensor,
        owner: Tensor,
        prefix: Tensor,
        step: Tensor | None = None,
        path: Tensor | None = None,
    ) -> Visibility:
        """Add the tokens of documents, at `spans`, to the values of the rollout tokens."""
        device, s = position.device, spans[-1][1]
        lengths = torch.tensor([end - start for start, end in spans])
        (of_documents,) = copy_to(device, torch.arange(len(spans)).repeat_interleave(lengths))
        return cls(
            position,
            torch.cat([of_documents, document]),
            torch.cat([torch.full((s,), -1, device=device), owner]),
            torch.cat([position[:s] + 1, prefix]),
            None if step is None else torch.cat([torch.zeros(s, dtype=torch.long, device=device), step]),
            None if path is None else F.pad(path, (0, 0, 0, 1), value=-2),
        )


def pass_mask(tokens: Visibility, pattern) -> BlockMask:
    """Return the mask of the X keys that each of the X queries attends to, shared by all heads.

    Everything that changes between batches is captured as tensors, so that a new layout does not recompile the kernel.
    """
    position, document, owner, limit = tokens.position, tokens.document, tokens.owner, tokens.limit
    device, step, path = position.device, tokens.step, tokens.path
    row = None if path is None else torch.where(owner < 0, len(path) - 1, owner)

    def is_own(query, key):
        if path is None:
            return (owner[key] == owner[query]) & (position[key] <= position[query])
        return path[row[query], step[key]] == owner[key]

    def seen(batch, head, query, key):
        prefix = (owner[key] < 0) & (document[key] == document[query]) & (position[key] < limit[query])
        own = (owner[key] >= 0) & is_own(query, key)
        return (prefix | own) & pattern.allowed(position[query], position[key])

    x = len(position)
    create = torch.compile(create_block_mask) if device.type == "cuda" else create_block_mask
    return create(seen, B=None, H=None, Q_LEN=x, KV_LEN=x, device=str(device))


@cache
def _kernel(compiled: bool):
    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention
