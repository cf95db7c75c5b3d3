"""Embeddings of rollouts and of the reference blocks they stand beside, in one pass of the feature network.

S  document tokens   M  blocks   N  rollouts per block   G  tokens per block   D  feature dimension
"""

from __future__ import annotations

import torch
from torch import Tensor

from ebft.features import FeatureNetwork, pool, token_features
from ebft.strided.attention import StridedPass
from ebft.strided.layout import Documents, StridedLayout
from ebft.strided.policy import backbone_states, prepare, run_inside


def embed_blocks(
    network: FeatureNetwork, documents: Documents, layout: StridedLayout, rollouts: Tensor
) -> tuple[Tensor, Tensor]:
    """Embeddings of rollouts (M, N, G): (M, N, D), and of the reference blocks: (M, D); float32.

    One forward over [documents | rollouts]. A reference block's states are the document's own, which see the same
    prefix as the rollouts do.
    """
    features = token_features(layout_states(network, documents, layout, rollouts))
    reference = features[layout.reference_index()]
    generated = features[len(documents.tokens) :].unflatten(0, rollouts.shape)
    return pool(generated, network.embed_method), pool(reference, network.embed_method)


def layout_states(
    network: FeatureNetwork, documents: Documents, layout: StridedLayout, rollouts: Tensor
) -> list[Tensor]:
    """Hidden states (S + M * N * G, hidden size) of [documents | rollouts] at each feature depth."""
    home, device = documents.tokens.device, network.device
    prepare(network.causal_lm)
    tokens = torch.cat([documents.tokens, rollouts.flatten()]).to(device)
    run = StridedPass(layout.to(device), "score", documents.positions.to(device), steps=layout.generate_max_len)
    states = network.hidden_states(
        lambda model: run_inside(model, lambda causal_lm: backbone_states(causal_lm, tokens, run)[None])
    )
    return [x[0].to(home) for x in states]
