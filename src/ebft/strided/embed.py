"""Embeddings of rollouts and of their reference blocks, in one pass of the feature network.

S  document tokens   M  blocks   N  rollouts per block   G  tokens per block   D  feature dimension
"""

from __future__ import annotations

import torch
from torch import Tensor

from ebft.features import FeatureNetwork, pool, token_features
from ebft.machine import copy_to
from ebft.prefix.forward import backbone_states, prepare, run_wrapped
from ebft.strided.layout import Documents, StridedLayout, split
from ebft.strided.passes import RolloutTree, StridedPass


def embed_blocks(
    network: FeatureNetwork,
    documents: Documents,
    layout: StridedLayout,
    rollouts: Tensor,
    *,
    tokens_per_pass: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the embeddings of the rollouts, (M, N, D), and of the reference blocks, (M, D), in float32.

    `rollouts` is (M, N, G). Runs one forward pass over [documents | rollouts]. The states of a reference block are
    the document's, which attend to the same prefix as the rollouts. Embeddings are of the tokens up to the end of the
    text.
    """
    lengths = [rollouts.shape[-1]]
    return embed_prefixes(network, documents, layout, rollouts, lengths, tokens_per_pass=tokens_per_pass)[0]


def embed_prefixes(
    network: FeatureNetwork,
    documents: Documents,
    layout: StridedLayout,
    rollouts: Tensor,
    lengths: list[int],
    *,
    tokens_per_pass: int | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Return `embed_blocks` of at most the first `lengths[i]` tokens of every block, for each i, from a single pass.

    A token's states do not depend on later tokens, so the states of a shorter rollout begin the states of a longer
    one.
    """
    generated: list[list[Tensor]] = [[] for _ in lengths]
    reference: list[list[Tensor]] = [[] for _ in lengths]
    for part in split(documents, layout, tokens_per_pass):
        tokens = rollouts[part.blocks]
        features = token_features(layout_states(network, part.documents, part.layout, tokens))
        of_documents, of_rollouts = features.split([len(part.documents.tokens), tokens.numel()])
        references = part.layout.reference_index()
        for found, states, ids in (
            (reference, of_documents[references.to(features.device)], part.documents.tokens[references]),
            (generated, of_rollouts.unflatten(0, tokens.shape), tokens),
        ):
            until_end = part.layout.lengths(ids).to(features.device) if part.layout.end_ids else None
            for index, length in enumerate(lengths):
                kept = None if until_end is None else until_end.clamp_max(length)
                found[index].append(pool(states[..., :length, :], network.embed_method, kept))
    home = rollouts.device  # the feature network may be on another device
    found = [[torch.cat(phi), torch.cat(phi_ref)] for phi, phi_ref in zip(generated, reference)]
    if network.device.type == "cpu":
        found = [copy_to(home, *pair) for pair in found]
    return [(phi.to(home), phi_ref.to(home)) for phi, phi_ref in found]


def layout_states(
    network: FeatureNetwork, documents: Documents, layout: StridedLayout, rollouts: Tensor
) -> list[Tensor]:
    """Return the hidden states of [documents | rollouts] at each feature depth: (S + M * N * G, hidden size) each.

    They are on the feature network's device.
    """
    device = network.device
    documents, layout = documents.to(device), layout.to(device)
    prepare(network.causal_lm)
    nodes = RolloutTree.of(rollouts.to(device), layout.merge_rollouts).nodes(rollouts.shape[-1])
    tokens = torch.cat([documents.tokens, nodes.tokens])
    run = StridedPass(layout=layout, document_positions=documents.positions, nodes=nodes)
    states = network.hidden_states(
        lambda model: run_wrapped(model, lambda causal_lm: backbone_states(causal_lm, tokens, run)[None])
    )
    s = len(documents.tokens)
    return [torch.cat([x[0, :s], x[0, s:][nodes.of_rollouts.flatten()]]) for x in states]
