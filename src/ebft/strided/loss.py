"""Log-probabilities of a whole layout in one pass, and the two terms of the loss.

S  document tokens   M  blocks   N  rollouts per block   G  tokens per rollout
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ebft.strided.attention import StridedPass
from ebft.strided.layout import Documents, StridedLayout
from ebft.strided.logps import Head, token_logps
from ebft.strided.policy import backbone_states, head_of, run_inside, vocab_size


def score(
    model: nn.Module,
    documents: Documents,
    layout: StridedLayout,
    rollouts: Tensor,
    *,
    temperature: float,
    text_gradient: bool,
    apply_dropout: bool,
) -> tuple[Tensor, Tensor]:
    """One forward over [documents | rollouts] through `model`, which may be wrapped (DDP, FSDP, PEFT).

    Returns the log-probabilities of the rollouts (M, N, G) at `temperature`, and those at temperature 1 of the
    reference tokens that `documents.ce_mask` marks; both float32. The last token of a rollout is scored but never
    read, so it is not in the forward.
    """
    m, n, g = rollouts.shape
    s = len(documents.tokens)
    run = StridedPass(layout, "score", documents.positions, steps=g - 1, apply_dropout=apply_dropout)

    def forward(causal_lm: PreTrainedModel) -> tuple[Tensor, Tensor]:
        head, vocabulary = head_of(causal_lm), vocab_size(causal_lm)
        states = backbone_states(causal_lm, torch.cat([documents.tokens, rollouts[..., :-1].flatten()]), run)
        text, rollout = states[:s], states[s:]
        # A rollout's first token follows document position a_b - 1; each later one its own predecessor.
        first = token_logps(text[layout.block_index - 1], rollouts[..., 0], head, temperature, vocabulary)
        later = token_logps(rollout, rollouts[..., 1:].reshape(-1, 1), head, temperature, vocabulary)
        logps = torch.cat([first.unsqueeze(-1), later.view(m, n, g - 1)], dim=-1)
        with torch.set_grad_enabled(text_gradient and torch.is_grad_enabled()):
            return logps, text_logps(text, documents, head, vocabulary)

    return run_inside(model, forward)


def text_logps(states: Tensor, documents: Documents, head: Head, vocabulary: int) -> Tensor:
    """Log-probabilities of the text's own predicted tokens (those of `ce_mask`) from hidden states (S, D)."""
    predicted = documents.ce_mask.nonzero().squeeze(1)
    return token_logps(states[predicted - 1], documents.tokens[predicted, None], head, 1.0, vocabulary).squeeze(-1)


def policy_gradient_loss(advantages: Tensor, logps: Tensor, num_tokens: Tensor | int) -> Tensor:
    """`rl_loss`, REINFORCE: `-(A logp).sum() / num_tokens` (appendix F).

    advantages (M, N), logps (M, N, G); no gradient flows into the advantages.
    """
    return -(advantages.detach().unsqueeze(-1) * logps).sum() / num_tokens


def cross_entropy_loss(logps: Tensor, num_tokens: Tensor | int) -> Tensor:
    """`ce_loss`: mean negative log-likelihood of the reference text from its log-probabilities."""
    return -logps.sum() / num_tokens
