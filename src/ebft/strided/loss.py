"""Log-probabilities of scored tokens, and the two terms of the loss.

B  documents   NB  blocks   N  rollouts per block   G  tokens per rollout   S  document tokens   R  scored rows
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
    """One forward over [document | rollouts] through `model`, which may wrap `causal_lm` (DDP, FSDP, PEFT).

    Returns the log-probabilities of the rollouts (B, NB, N, G) at `temperature`, and those of the reference text
    at temperature 1, (B, S - 1), 0 where `documents.ce_mask` is off; both float32. The last token of a rollout
    is scored but never read, so it is not in the forward.
    """
    b, nb, n, g = rollouts.shape
    s = documents.input_ids.shape[1]
    rows = rows_per_chunk(causal_lm)
    run = StridedPass(layout, "score", num_document_tokens=s, steps=g - 1, apply_dropout=apply_dropout)
    before_anchor = (layout.anchors - 1).clamp_min(0)

    def scored(hidden: Tensor, head) -> tuple[Tensor, Tensor]:
        document, rollout = hidden[:, :s], hidden[:, s:]
        # A rollout's first token follows document position a_b - 1; each later one its own predecessor.
        states = document.gather(1, before_anchor[..., None].expand(-1, -1, hidden.shape[-1]))
        first = token_logps(states.flatten(0, 1), rollouts[..., 0].flatten(0, 1), head, temperature, rows)
        later = token_logps(rollout.flatten(0, 1), rollouts[..., 1:].reshape(-1, 1), head, temperature, rows)
        logps = torch.cat([first.view(b, nb, n, 1), later.view(b, nb, n, g - 1)], dim=-1)
        with torch.set_grad_enabled(ce_gradient and torch.is_grad_enabled()):
            return logps, text_logps(document, documents, head, rows)

    input_ids = torch.cat([documents.input_ids, rollouts[..., :-1].flatten(1)], dim=1)
    return model(input_ids=input_ids, strided=run, on_hidden=scored)


def text_logps(hidden: Tensor, documents: Documents, head, rows: int) -> Tensor:
    """Log-probabilities of the text itself from hidden states (B, S, D): (B, S - 1), 0 where not predicted."""
    predicted = documents.ce_mask[:, 1:]
    targets = documents.input_ids[:, 1:][predicted].unsqueeze(-1)
    logps = token_logps(hidden[:, :-1][predicted], targets, head, 1.0, rows)
    return logps.new_zeros(predicted.shape).masked_scatter(predicted, logps)


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


def policy_gradient_loss(advantages: Tensor, logps: Tensor, block_mask: Tensor, num_tokens: Tensor | int) -> Tensor:
    """`rl_loss`, REINFORCE: `-(A logp).sum() / num_tokens` over real blocks (appendix F).

    advantages (B, NB, N), logps (B, NB, N, G), block_mask (B, NB); no gradient flows into the advantages.
    """
    weighted = advantages.detach().unsqueeze(-1) * logps
    return -(weighted * block_mask[:, :, None, None]).sum() / num_tokens


def cross_entropy_loss(logps: Tensor, num_tokens: Tensor | int) -> Tensor:
    """`ce_loss`: mean negative log-likelihood of the reference text from its (masked) log-probabilities (B, S - 1)."""
    return -logps.sum() / num_tokens
