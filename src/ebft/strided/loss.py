"""Log-probabilities of scored tokens, and the two terms of the loss.

S  document tokens   M  blocks   N  rollouts per block   G  tokens per rollout   R  scored rows
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ebft.strided.attention import StridedPass
from ebft.strided.layout import Documents, StridedLayout
from ebft.strided.rollout import rows_per_chunk, tempered_logp


def score(
    model: nn.Module,
    causal_lm: nn.Module,
    documents: Documents,
    layout: StridedLayout,
    rollouts: Tensor,
    *,
    temperature: float,
    ce_gradient: bool,
    apply_dropout: bool,
) -> tuple[Tensor, Tensor]:
    """One forward over [documents | rollouts] through `model`, which may wrap `causal_lm` (DDP, FSDP, PEFT).

    Returns the log-probabilities of the rollouts (M, N, G) at `temperature`, and those at temperature 1 of the
    reference tokens that `documents.ce_mask` marks; both float32. The last token of a rollout is scored but never
    read, so it is not in the forward.
    """
    m, n, g = rollouts.shape
    s = len(documents.tokens)
    rows = rows_per_chunk(causal_lm)
    run = StridedPass(layout, "score", documents.positions, steps=g - 1, apply_dropout=apply_dropout)

    def scored(hidden: Tensor, head) -> tuple[Tensor, Tensor]:
        document, rollout = hidden[0, :s], hidden[0, s:]
        # A rollout's first token follows document position a_b - 1; each later one its own predecessor.
        first = token_logps(document[layout.block_index - 1], rollouts[..., 0], head, temperature, rows)
        later = token_logps(rollout, rollouts[..., 1:].reshape(-1, 1), head, temperature, rows)
        logps = torch.cat([first.unsqueeze(-1), later.view(m, n, g - 1)], dim=-1)
        with torch.set_grad_enabled(ce_gradient and torch.is_grad_enabled()):
            return logps, text_logps(document, documents, head, rows)

    input_ids = torch.cat([documents.tokens, rollouts[..., :-1].flatten()])[None]
    return model(input_ids=input_ids, strided=run, on_hidden=scored)


def text_logps(hidden: Tensor, documents: Documents, head, rows: int) -> Tensor:
    """Log-probabilities of the text's own predicted tokens (those of `ce_mask`) from hidden states (S, D)."""
    predicted = documents.ce_mask.nonzero().squeeze(1)
    return token_logps(hidden[predicted - 1], documents.tokens[predicted, None], head, 1.0, rows).squeeze(-1)


def token_logps(states: Tensor, targets: Tensor, head, temperature: float, rows: int) -> Tensor:
    """Log-probabilities (R, K) of targets (R, K) after hidden states (R, D), float32.

    The head runs on `rows` rows at a time and again in backward, so that no (R, V) tensor is kept.
    """
    if states.shape[0] == 0:
        return states.new_zeros(targets.shape, dtype=torch.float32) + states.sum() * 0.0

    def chunk_logps(states_chunk: Tensor, targets_chunk: Tensor) -> Tensor:
        return tempered_logp(head(states_chunk), temperature).gather(-1, targets_chunk)

    chunks = []
    for states_chunk, targets_chunk in zip(states.split(rows), targets.split(rows)):
        if torch.is_grad_enabled():
            chunks.append(
                checkpoint(chunk_logps, states_chunk, targets_chunk, use_reentrant=False, preserve_rng_state=False)
            )
        else:
            chunks.append(chunk_logps(states_chunk, targets_chunk))
    return torch.cat(chunks)


def policy_gradient_loss(advantages: Tensor, logps: Tensor, num_tokens: Tensor | int) -> Tensor:
    """`rl_loss`, REINFORCE: `-(A logp).sum() / num_tokens` (appendix F).

    advantages (M, N), logps (M, N, G); no gradient flows into the advantages.
    """
    return -(advantages.detach().unsqueeze(-1) * logps).sum() / num_tokens


def cross_entropy_loss(logps: Tensor, num_tokens: Tensor | int) -> Tensor:
    """`ce_loss`: mean negative log-likelihood of the reference text from its log-probabilities."""
    return -logps.sum() / num_tokens
