"""Log-probabilities of tokens from hidden states: the head runs where a token is scored, a few rows at a time.

R  scored rows   D  hidden size   V  vocabulary   K  tokens scored in each row
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]  # hidden states (R, D) -> logits (R, V)

# Logits held at once: 2**25 float32 numbers are 128 MiB.
LOGITS_PER_CHUNK = 2**25


def tempered_logp(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities (R, V), float32, of softmax(logits / temperature): what is sampled is what is scored."""
    logits = logits.float()
    return (logits if temperature == 1 else logits / temperature).log_softmax(-1)


def token_logps(states: Tensor, targets: Tensor, head: Head, temperature: float, vocab_size: int) -> Tensor:
    """Log-probabilities (R, K) of targets (R, K) after hidden states (R, D), float32."""
    return chosen_logps(states, lambda logp, rows: targets[rows], head, temperature, vocab_size)[1]


def chosen_logps(
    states: Tensor,
    choose: Callable[[Tensor, slice], Tensor],
    head: Head,
    temperature: float,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """Tokens (R, K) that `choose(logp (rows, V), rows)` picks, and their log-probabilities (R, K), float32.

    In backward the head runs again, so that no (R, V) tensor is kept; what was chosen stays chosen.
    """
    tokens, logps = [], []
    size = max(16, LOGITS_PER_CHUNK // vocab_size)
    for start in range(0, max(len(states), 1), size):  # no rows are one empty chunk, which keeps the graph whole
        rows, chosen = slice(start, start + size), []

        def chunk_logps(chunk: Tensor, rows=rows, chosen=chosen) -> Tensor:
            logp = tempered_logp(head(chunk), temperature)
            if not chosen:
                with torch.no_grad():
                    chosen.append(choose(logp.detach(), rows))
            return logp.gather(-1, chosen[0])

        if torch.is_grad_enabled():
            # With the random state kept: an adapted head may drop out.
            logps.append(checkpoint(chunk_logps, states[rows], use_reentrant=False))
        else:
            logps.append(chunk_logps(states[rows]))
        tokens += chosen
    return torch.cat(tokens), torch.cat(logps)
