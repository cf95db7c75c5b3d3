"""Embeddings of rollouts and of the reference blocks they stand beside, in one pass of the feature network.

B  documents   NB  blocks   N  rollouts per block   G  tokens per block   D  feature dimension
"""

from __future__ import annotations

import torch
from torch import Tensor

from ebft.features import FeatureNetwork, pool, token_features
from ebft.strided.attention import StridedPass
from ebft.strided.layout import Documents, StridedLayout
from ebft.strided.policy import prepare


def embed_blocks(
    network: FeatureNetwork, documents: Documents, layout: StridedLayout, rollouts: Tensor
) -> tuple[Tensor, Tensor]:
    """Embeddings of rollouts (B, NB, N, G): (B, NB, N, D), and of the reference blocks: (B, NB, D); float32.

    One forward over [document | rollouts]. A reference block's states are the document's own, which see the same
    prefix as the rollouts do.
    """
    s = documents.input_ids.shape[1]
    features = token_features(layout_states(network, documents, layout, rollouts))
    reference_at = layout.reference_positions().flatten(1)[..., None].expand(-1, -1, features.shape[-1])
    reference = features[:, :s].gather(1, reference_at).unflatten(1, (layout.num_blocks, -1))
    generated = features[:, s:].unflatten(1, tuple(rollouts.shape[1:]))
    return pool(generated, network.embed_method), pool(reference, network.embed_method)


def layout_states(
    network: FeatureNetwork, documents: Documents, layout: StridedLayout, rollouts: Tensor
) -> list[Tensor]:
    """Hidden states (B, S + NB * N * G, hidden size) of [document | rollouts] at each feature depth."""
    home, device = documents.input_ids.device, network.device
    prepare(network.causal_lm)
    input_ids = torch.cat([documents.input_ids, rollouts.flatten(1)], dim=1).to(device)
    run = StridedPass(
        layout.to(device),
        "score",
        num_document_tokens=documents.input_ids.shape[1],
        steps=layout.generate_max_len,
    )
    states = network.hidden_states(
        lambda model: model(input_ids=input_ids, strided=run, on_hidden=lambda hidden, head: hidden)
    )
    return [x.to(home) for x in states]
