"""Log-probabilities of tokens from hidden states: the head is applied to scored positions only, in chunks of rows.

R  scored rows   D  hidden size   V  vocabulary   K  tokens scored in each row
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ebft.models.products import product, report
from ebft.prefix.logp_gradients import (
    Entropy,
    Linear,
    Logps,
    OfLinearHead,
    RunInBackward,
    Slopes,
    WithSlopes,
    distinct_tokens,
    grad_of_logits,
)
from ebft.prefix.sampling import Truncation
from ebft.prefix.softmax import Softmax, of_device, slices, tiles

# Logits held in memory at once. On CPU, small enough (32 MiB in float32) for the allocator to reuse the same memory;
# larger blocks would be requested from the system again for every chunk.
LOGITS_PER_CHUNK = {"cpu": 2**23, "other": 2**25}

Choose = Callable[["Softmax", slice], Tensor]  # (softmax of some rows, the rows) -> tokens (rows, K)


@dataclass(frozen=True)
class Head:
    """The function from hidden states (R, D) to logits (R, V), and its trainable parameters.

    `linear`: its weights, if it is a linear layer and nothing else.
    """

    logits: Callable[[Tensor], Tensor]
    vocab_size: int
    trained: tuple[Tensor, ...]
    linear: Linear | None = None

    def gives_slopes(self, columns: int) -> bool:
        """Whether gradients of the log-probabilities of `columns` tokens in each row can be computed with them."""
        return not self.trained and (columns == 1 or self.linear is not None)

    def rows_per_chunk(self, device: torch.device) -> int:
        """Return the number of rows whose logits are computed at once."""
        return max(16, of_device(LOGITS_PER_CHUNK, device) // self.vocab_size)


class Scored(NamedTuple):
    """Tokens (R, K), their log-probabilities (R, K), and what their gradients are computed from.

    log_sums (R, 1): log-sum-exp of each row's logits / temperature. slopes, optional: the gradients of the
    log-probabilities with respect to the states.
    """

    tokens: Tensor
    logps: Tensor
    log_sums: Tensor
    slopes: Slopes | None

    @classmethod
    def joined(cls, parts: list[Scored]) -> Scored:
        """Return the rows of all parts, with as many tokens in each row as in the longest: the first one is repeated.

        Its log-probabilities there are 0. Another token would be among those that a truncation keeps, see `Softmax`.
        """
        columns = max(part.tokens.shape[1] for part in parts)

        def wide(values: Tensor) -> Tensor:
            return F.pad(values, (0, columns - values.shape[1]))

        def repeated(tokens: Tensor) -> Tensor:
            return tokens[:, :1].expand(-1, columns - tokens.shape[1])

        slopes = [part.slopes for part in parts if part.slopes is not None]
        return cls(
            torch.cat([torch.cat([part.tokens, repeated(part.tokens)], 1) for part in parts]),
            torch.cat([wide(part.logps) for part in parts]),
            torch.cat([part.log_sums for part in parts]),
            Slopes.joined(slopes, columns) if len(slopes) == len(parts) else None,
        )


def token_logps(
    states: Tensor, targets: Tensor, head: Head, temperature: float, truncation: Truncation | None = None
) -> Tensor:
    """Return the log-probabilities (R, K) of targets (R, K) given hidden states (R, D), in float32."""
    columns, needs_states = targets.shape[-1], torch.is_grad_enabled() and states.requires_grad
    if needs_states and head.gives_slopes(columns):
        scored = choose_tokens(states.detach(), _those(targets), head, temperature, True, truncation, targets)
        return with_gradient(states, scored, head, temperature, truncation)
    if needs_states and head.gives_slopes(1) and truncation is None:  # rows with several tokens are repeated
        row, column, index = distinct_tokens(targets)
        return token_logps(states[row], targets[row, column, None], head, temperature).squeeze(-1)[index]
    if torch.is_grad_enabled() and head.linear is not None and head.trained and truncation is None:
        scored = choose_tokens(states.detach(), _those(targets), head, temperature)
        return with_gradient(states, scored, head, temperature)
    logps = []
    for rows in slices(len(states), head.rows_per_chunk(states.device)):

        def chunk_logps(chunk: Tensor, rows=rows) -> Tensor:
            return Logps.apply(head.logits(chunk), targets[rows], temperature, truncation)

        if torch.is_grad_enabled():
            # The head is recomputed in backward with the same random state, since an adapted head may use dropout.
            logps.append(checkpoint(chunk_logps, states[rows], use_reentrant=False))
        else:
            logps.append(chunk_logps(states[rows]))
    return torch.cat(logps)


def token_logps_and_entropy(
    states: Tensor,
    targets: Tensor,
    head: Head,
    temperature: float,
    entropy_gradient: bool = False,
    truncation: Truncation | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities (R,) of targets (R,) given states (R, D), and the entropies (R,) in nats.

    The entropies are without gradient unless `entropy_gradient` is set.
    """
    logps, entropies = [], []
    if torch.is_grad_enabled() and states.requires_grad and not head.trained and not entropy_gradient:

        def choose(softmax: Softmax, rows: slice) -> Tensor:
            entropies.append(softmax.entropy())
            return targets[rows, None]

        scored = choose_tokens(states.detach(), choose, head, temperature, True, truncation, targets[:, None])
        return with_gradient(states, scored, head, temperature, truncation).squeeze(-1), torch.cat(entropies).squeeze(
            -1
        )
    for rows in slices(len(states), head.rows_per_chunk(states.device)):

        def of_chunk(chunk: Tensor, rows=rows) -> tuple[Tensor, Tensor]:
            logits = head.logits(chunk)
            with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
                entropy = Entropy.apply(logits, targets[rows, None], temperature, truncation)
            return Logps.apply(logits, targets[rows, None], temperature, truncation), entropy

        both = (
            checkpoint(of_chunk, states[rows], use_reentrant=False)
            if torch.is_grad_enabled()
            else of_chunk(states[rows])
        )
        logps.append(both[0])
        entropies.append(both[1])
    return torch.cat(logps).squeeze(-1), torch.cat(entropies).squeeze(-1)


def choose_tokens(
    states: Tensor,
    choose: Choose,
    head: Head,
    temperature: float,
    slopes: bool = False,
    truncation: Truncation | None = None,
    known: Tensor | None = None,
) -> Scored:
    """Return the tokens that `choose` selects from the distributions given states (R, D), with log-probabilities.

    `known` (R, K) are these tokens if they are known, see `Softmax`.

    With `slopes`, the gradients of the log-probabilities with respect to the states are computed while the softmax is
    available, so that backward needs neither the head nor the softmax, see `Head.gives_slopes`.
    """
    found = []
    differentiates = slopes and head.linear is None
    for chunk in slices(len(states), head.rows_per_chunk(states.device)):
        x, tokens = states[chunk], None if known is None else known[chunk]
        with torch.set_grad_enabled(differentiates):
            x = x.detach().requires_grad_() if differentiates else x
            logits = head.logits(x)
        with torch.no_grad():
            *chosen, of_slopes = _choose(logits.detach(), choose, chunk.start, temperature, slopes, truncation, tokens)
        if of_slopes is not None:
            grad_logits, index, row = of_slopes
            if differentiates:
                values = torch.autograd.grad(logits, x, grad_logits)[0]
            else:
                report(head.linear.weight, len(grad_logits))
                values = product(grad_logits, head.linear.weight.to(grad_logits.dtype)).to(x.dtype)
            of_slopes = Slopes(values, index, row)
        found.append(Scored(*chosen, of_slopes))
    return Scored.joined(found)


def _choose(
    logits: Tensor,
    choose: Choose,
    first_row: int,
    temperature: float,
    slopes: bool,
    truncation: Truncation | None,
    known: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """Return the fields of `Scored` for a chunk; instead of slopes, the gradients of logits, and the slopes' fields."""
    tokens, logps, log_sums, grad_logits, count, numbers, edges = [], [], [], None, 0, [], []
    for rows in tiles(logits):
        softmax = Softmax(logits[rows], temperature, truncation, None if known is None else known[rows])
        of_tile = choose(softmax, slice(first_row + rows.start, first_row + rows.stop))
        tokens.append(of_tile)
        logps.append(softmax.logps(of_tile))
        log_sums.append(softmax.log_sum_exp())
        if not slopes:
            continue
        if grad_logits is None:  # room for all tokens, of which the distinct ones are used
            grad_logits = logits.new_empty(of_tile.shape[1] * len(logits), logits.shape[1])
        row, column, number = distinct_tokens(of_tile)
        probabilities = softmax.probabilities if len(row) == len(of_tile) else softmax.probabilities[row]
        distinct = of_tile[row, column].unsqueeze(1)
        grad = grad_of_logits(probabilities, distinct, torch.ones_like(distinct, dtype=logps[-1].dtype), temperature)
        grad_logits[count : count + len(row)] = grad
        numbers.append(number + count)
        edges.append(row + rows.start)
        count += len(row)
    of_slopes = (grad_logits[:count], torch.cat(numbers), torch.cat(edges)) if slopes else None
    return torch.cat(tokens), torch.cat(logps), torch.cat(log_sums), of_slopes


def with_gradient(
    states: Tensor, scored: Scored, head: Head, temperature: float, truncation: Truncation | None = None
) -> Tensor:
    """Return the log-probabilities of `scored`, differentiable with respect to `states` (R, D) and trained weights.

    `truncation`: of the distributions that the tokens were scored under.
    """
    if scored.slopes is not None:
        return WithSlopes.apply(states, scored.logps, *scored.slopes)
    if head.linear is not None and head.trained and truncation is None:  # else all logits of a row are compared
        return OfLinearHead.apply(states, *scored[:3], temperature, *head.linear)
    return RunInBackward.apply(states, scored.tokens, scored.logps, head, temperature, truncation, *head.trained)


def _those(targets: Tensor) -> Choose:
    return lambda softmax, rows: targets[rows]
