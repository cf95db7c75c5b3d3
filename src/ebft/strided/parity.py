"""A parity check before training: a few tokens through strided attention and through the plain model must agree.

Known obstacles are refused by name (policy.py, attention/). This catches the ones nobody has named yet: a new
architecture whose layers mix tokens outside attention, share keys between layers, read the batch's layout, or add
noise while training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ebft.errors import EBFTError, ModelError
from ebft.features import FeatureNetwork
from ebft.models.causal_lm import evaluating
from ebft.over_transformers import override_attn_implementation
from ebft.strided.embed import layout_states
from ebft.strided.layout import Documents, StridedLayout
from ebft.strided.loss import score
from ebft.strided.policy import prepare
from ebft.strided.rollout import sample_rollouts

_DOCUMENT_TOKENS = 24
# Nats. Full precision: the largest difference, between two orders of summation. Less than that: the median, as a
# router's near-tie may send a single token to another expert; a layout that leaks reaches them all.
_FULL_TOLERANCE, _ROUGH_TOLERANCE = 5e-3, 0.15
_HINT = "Use `ebft.mode: structured` for this model"


def check_parity(causal_lm: PreTrainedModel, network: FeatureNetwork, as_trained: bool = True) -> None:
    """Raise ModelError where strided EBFT differs from the plain model on a short random document.

    Three blocks of two rollouts, sampled with the cache and scored in one pass, in training mode if `as_trained`; the
    plain twin runs each short sequence by itself with eager attention. Hidden states of the feature network are held
    against those that the plain network returns.
    """
    prepare(causal_lm)
    config, device = causal_lm.config.get_text_config(), next(causal_lm.parameters()).device
    generator = torch.Generator().manual_seed(0)
    length = min(_DOCUMENT_TOKENS, getattr(config, "max_position_embeddings", None) or _DOCUMENT_TOKENS)
    ids = torch.randint(0, config.vocab_size, (1, length), generator=generator).to(device)
    documents = Documents.from_inputs({"input_ids": ids})
    layout = StridedLayout.place(documents, stride=7, context_length=5, generate_max_len=3, n_samples_per_prompt=2)
    noise = torch.rand(layout.num_blocks, 2, 3, generator=generator).to(device)
    with _refusing(causal_lm):
        with evaluating(causal_lm):
            rollouts = sample_rollouts(causal_lm, documents, layout, temperature=1.0, noise=noise).tokens
            with override_attn_implementation(causal_lm, "eager"):
                expected = _plain_logps(causal_lm, ids[0], layout, rollouts)
        logps = _scored(causal_lm, documents, layout, rollouts, as_trained)
        _compare(causal_lm, "log-probabilities", (logps - expected).abs())
        _compare(causal_lm, "hidden states", _state_differences(network, documents, layout, rollouts))


@contextmanager
def _refusing(causal_lm: PreTrainedModel) -> Iterator[None]:
    """Whatever breaks inside the model under strided attention is a refusal that says where."""
    try:
        yield
    except (EBFTError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ModelError(
            f"{type(causal_lm).__name__} cannot run with strided attention ({type(error).__name__}: {error}). {_HINT}"
        ) from error


def _compare(causal_lm: PreTrainedModel, what: str, differences: Tensor) -> None:
    rough = _computes_roughly(causal_lm)
    difference = (differences.median() if rough else differences.max()).item()
    tolerance = _ROUGH_TOLERANCE if rough else _FULL_TOLERANCE
    if not difference <= tolerance:
        raise ModelError(
            f"{type(causal_lm).__name__}: strided {what} differ from the plain model's by {difference:.2g} on a short "
            f"random document (allowed: {tolerance:g}), so something in this architecture depends on more than "
            f"attention to a prefix, or adds noise while training. {_HINT}"
        )


def _computes_roughly(causal_lm: PreTrainedModel) -> bool:
    """Whether products are rounded to fewer digits than float32 has: half precision, quantised weights, TF32."""
    tf32 = next(causal_lm.parameters()).is_cuda and torch.backends.cuda.matmul.allow_tf32
    return causal_lm.dtype in (torch.bfloat16, torch.float16) or getattr(causal_lm, "is_quantized", False) or tf32


def _scored(causal_lm, documents: Documents, layout: StridedLayout, rollouts: Tensor, as_trained: bool) -> Tensor:
    """Log-probabilities of the rollouts by the training forward, without gradients."""
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
    """Log-probabilities (M, N, G) of the rollouts, each short sequence in a row of its own."""
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
    """Differences of the document's unit states at each feature depth from `output_hidden_states`."""
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
