"""A rehearsal before training: a few tokens through strided attention and through the plain model must agree.

Known obstacles are refused by name (policy.py, attention.py). This catches the ones nobody has named yet: a new
architecture whose layers mix tokens outside attention, share keys between layers, or read the batch's layout.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ebft.errors import ModelError
from ebft.models.causal_lm import evaluating
from ebft.strided.layout import Documents, StridedLayout
from ebft.strided.loss import score
from ebft.strided.policy import override_attn_implementation, prepare
from ebft.strided.rollout import sample_rollouts

_DOCUMENT_TOKENS = 24
# Nats. Full precision: the largest difference, between two orders of summation. Half precision: the median, as a
# router's near-tie may send a single token to another expert; a layout that leaks reaches them all.
_FULL_TOLERANCE, _HALF_TOLERANCE = 5e-3, 0.15


def check_exact(causal_lm: PreTrainedModel) -> None:
    """Raise ModelError where strided log-probabilities differ from the plain model's on a short random document.

    Three blocks of two rollouts, sampled with the cache and scored in one pass; the plain twin runs each short
    sequence by itself with eager attention, in the model's own dtype.
    """
    prepare(causal_lm)
    config, device = causal_lm.config.get_text_config(), next(causal_lm.parameters()).device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (1, _DOCUMENT_TOKENS), generator=generator).to(device)
    documents = Documents.from_inputs({"input_ids": ids})
    layout = StridedLayout.place(
        documents, stride=7, context_length=5, generate_max_len=3, n_samples_per_prompt=2, min_completion_prefix=0
    )
    with evaluating(causal_lm):
        noise = torch.rand(*layout.anchors.shape, 2, 3, generator=generator).to(device)
        rollouts, _ = sample_rollouts(causal_lm, documents, layout, temperature=1.0, noise=noise)
        logps, _ = score(
            causal_lm,
            causal_lm,
            documents,
            layout,
            rollouts,
            temperature=1.0,
            ce_gradient=False,
            apply_dropout=False,
        )
        with override_attn_implementation(causal_lm, "eager"):
            expected = _plain_logps(causal_lm, ids[0], layout, rollouts)
    half = causal_lm.dtype in (torch.bfloat16, torch.float16)
    differences = (logps - expected).abs()
    difference = (differences.median() if half else differences.max()).item()
    tolerance = _HALF_TOLERANCE if half else _FULL_TOLERANCE
    if not difference <= tolerance:
        raise ModelError(
            f"{type(causal_lm).__name__}: strided log-probabilities differ from the plain model's by {difference:.2g} "
            f"nats on a short random document (allowed: {tolerance:g}), so something in this architecture depends on "
            "more than attention to a prefix. Use `ebft.mode: structured` for this model"
        )


def _plain_logps(causal_lm: PreTrainedModel, ids: Tensor, layout: StridedLayout, rollouts: Tensor) -> Tensor:
    """Log-probabilities (1, NB, N, G) of the rollouts, each short sequence in a row of its own."""
    expected = torch.zeros(rollouts.shape, device=ids.device)
    g = layout.generate_max_len
    for b, anchor in enumerate(layout.anchors[0].tolist()):
        prefix = ids[:anchor].expand(layout.num_samples, -1)
        sequences = torch.cat([prefix, rollouts[0, b]], dim=1)
        logp = causal_lm(input_ids=sequences, use_cache=False).logits[:, anchor - 1 : -1].float().log_softmax(-1)
        expected[0, b] = logp.gather(-1, sequences[:, -g:, None]).squeeze(-1)
    return expected
