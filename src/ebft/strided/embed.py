"""Embeddings of rollouts and of the reference blocks they stand beside, in one pass of the feature network.

S  document tokens   M  blocks   N  rollouts per block   G  tokens per block   D  feature dimension
"""

from __future__ import annotations

import torch
from torch import Tensor

from ebft.features import FeatureNetwork, pool, token_features
from ebft.strided.attention import StridedPass
from ebft.strided.layout import Documents, StridedLayout, split
from ebft.strided.policy import backbone_states, prepare, run_inside


def embed_blocks(
    network: FeatureNetwork,
    documents: Documents,
    layout: StridedLayout,
    rollouts: Tensor,
    *,
    tokens_per_pass: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Embeddings of rollouts (M, N, G): (M, N, D), and of the reference blocks: (M, D); float32.

    One forward over [documents | rollouts]. A reference block's states are the document's own, which see the same
    prefix as the rollouts do.
    """
    generated, reference = [], []
    for part in split(documents, layout, tokens_per_pass):
        tokens = rollouts[part.blocks]
        features = token_features(layout_states(network, part.documents, part.layout, tokens))
        reference.append(pool(features[part.layout.reference_index()], network.embed_method))
        features = features[len(part.documents.tokens) :].unflatten(0, tokens.shape)
        generated.append(pool(features, network.embed_method))
    home = rollouts.device  # the network may live on another
    return torch.cat(generated).to(home), torch.cat(reference).to(home)


def layout_states(
    network: FeatureNetwork, documents: Documents, layout: StridedLayout, rollouts: Tensor
) -> list[Tensor]:
    """Hidden states (S + M * N * G, hidden size) of [documents | rollouts] at each feature depth, on its device."""
    device = network.device
    prepare(network.causal_lm)
    tokens = torch.cat([documents.tokens, rollouts.flatten()]).to(device)
    run = StridedPass(layout.to(device), "score", documents.positions.to(device), steps=layout.generate_max_len)
    states = network.hidden_states(
        lambda model: run_inside(model, lambda causal_lm: backbone_states(causal_lm, tokens, run)[None])
    )
    return [x[0] for x in states]
