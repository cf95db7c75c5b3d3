"""A parity check before training: strided attention and the plain model must agree on a short document.

Model features that are known to be unsupported raise an error that names them (policy.py, attention/). This check
detects the unknown ones: an architecture whose layers mix tokens outside attention, share keys between layers, depend
on the layout of the batch, or add noise in training mode.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ebft.features import FeatureNetwork
from ebft.models.causal_lm import evaluating
from ebft.models.trainable import rates_as_loaded
from ebft.over_transformers import override_attn_implementation
from ebft.prefix.agreement import compare, refusing
from ebft.prefix.distant_tokens import check_distant_tokens
from ebft.prefix.policy import prepare
from ebft.strided.embed import layout_states
from ebft.strided.layout import Documents, StridedLayout
from ebft.strided.loss import score
from ebft.strided.rollout import sample_rollouts

_DOCUMENT_TOKENS = 24


def check_parity(causal_lm: PreTrainedModel, network: FeatureNetwork, as_trained: bool = True) -> None:
    """Raise ModelError if strided EBFT differs from the plain model on a short random document.

    Three blocks of two rollouts are sampled with the cache and scored in one pass, in training mode if `as_trained`.
    The plain model runs each sequence separately with eager attention; its log-probabilities must be those of the
    samples and of the scores. The hidden states of the feature network are compared with those from
    `output_hidden_states`.
    """
    prepare(causal_lm)
    config, device = causal_lm.config.get_text_config(), next(causal_lm.parameters()).device
    generator = torch.Generator().manual_seed(0)
    length = min(_DOCUMENT_TOKENS, getattr(config, "max_position_embeddings", None) or _DOCUMENT_TOKENS)
    ids = torch.randint(0, config.vocab_size, (1, length), generator=generator).to(device)
    documents = Documents.from_inputs({"input_ids": ids})
    layout = StridedLayout.place(documents, stride=7, context_length=5, generate_max_len=3, n_samples_per_prompt=2)
    noise = torch.rand(layout.num_blocks, 2, 3, generator=generator).to(device)
    with refusing(causal_lm):
        with evaluating(causal_lm):
            sampled = sample_rollouts(causal_lm, documents, layout, temperature=1.0, noise=noise)
            rollouts = sampled.tokens
            with rates_as_loaded(causal_lm), override_attn_implementation(causal_lm, "eager"):
                expected = _plain_logps(causal_lm, ids[0], layout, rollouts)
        logps = _scored(causal_lm, documents, layout, rollouts, as_trained)
        compare(causal_lm, "log-probabilities of strided samples", (sampled.logps - expected).abs())
        compare(causal_lm, "strided log-probabilities", (logps - expected).abs())
        compare(causal_lm, "strided hidden states", _state_differences(network, documents, layout, rollouts))
        with evaluating(causal_lm):
            check_distant_tokens(causal_lm)


def _scored(causal_lm, documents: Documents, layout: StridedLayout, rollouts: Tensor, as_trained: bool) -> Tensor:
    """Return the log-probabilities of the rollouts from the training forward pass, without gradients."""
    with evaluating(causal_lm):
        causal_lm.train(as_trained)
        return score(
            causal_lm,
            documents,
            layout,
            rollouts,
            temperature=1.0,
            text_gradient=False,
            apply_dropout=False,
        )[0]


def _plain_logps(causal_lm: PreTrainedModel, ids: Tensor, layout: StridedLayout, rollouts: Tensor) -> Tensor:
    """Return the log-probabilities (M, N, G) of the rollouts, with each sequence in a separate row."""
    expected = torch.zeros(rollouts.shape, device=ids.device)
    g = layout.generate_max_len
    for b, anchor in enumerate(layout.anchors[0]):
        prefix = ids[:anchor].expand(layout.num_samples, -1)
        sequences = torch.cat([prefix, rollouts[b]], dim=1)
        logp = causal_lm(input_ids=sequences, use_cache=False).logits[:, anchor - 1 : -1].float().log_softmax(-1)
        expected[b] = logp.gather(-1, sequences[:, -g:, None]).squeeze(-1)
    return expected


def _state_differences(
    network: FeatureNetwork, documents: Documents, layout: StridedLayout, rollouts: Tensor
) -> Tensor:
    """Return the differences of the document's L2-normalised states from `output_hidden_states`, at each depth."""
    ours = layout_states(network, documents, layout, rollouts)
    plain = network.plain_hidden_states(documents.tokens[None].to(network.device))
    s = len(documents.tokens)
    unit = torch.nn.functional.normalize
    return torch.stack(
        [
            (unit(a[:s].float(), dim=-1) - unit(b[0].to(a.device).float(), dim=-1)).norm(dim=-1)
            for a, b in zip(ours, plain)
        ]
    )
