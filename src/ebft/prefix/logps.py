"""Log-probabilities of tokens from hidden states: the head is applied to scored positions only, in chunks of rows.

R  scored rows   D  hidden size   V  vocabulary   K  tokens scored in each row
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from ebft.prefix.sampling import Truncation

# Logits held in memory at once. On CPU, small enough (32 MiB in float32) for the allocator to reuse the same memory;
# larger blocks would be requested from the system again for every chunk.
LOGITS_PER_CHUNK = {"cpu": 2**23, "other": 2**25}
# Elements of a softmax that are processed at once; on CPU, as many as fit in the processor's cache.
_SOFTMAX_PER_TILE = {"cpu": 2**18, "other": 2**25}

Choose = Callable[["Softmax", slice], Tensor]  # (softmax of some rows, the rows) -> tokens (rows, K)


@dataclass(frozen=True)
class Head:
    """The function from hidden states (R, D) to logits (R, V), and its trainable parameters."""

    logits: Callable[[Tensor], Tensor]
    vocab_size: int
    trained: tuple[Tensor, ...]

    def rows_per_chunk(self, device: torch.device) -> int:
        """Return the number of rows whose logits are computed at once."""
        return max(16, _of_device(LOGITS_PER_CHUNK, device) // self.vocab_size)


class Softmax:
    """softmax(logits / temperature) of logits (R, V), in float32, used for both sampling and scoring.

    With `truncation`, only the tokens that it keeps have a probability, and `tokens` (R, K), which were sampled: other
    weights, or rounding, could exclude them. probabilities (R, V): the softmax itself.
    """

    def __init__(
        self, logits: Tensor, temperature: float, truncation: Truncation | None = None, tokens: Tensor | None = None
    ):
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        if temperature != 1:
            scores /= temperature
        scores -= scores.amax(-1, keepdim=True)
        if truncation is not None:
            kept = truncation.kept(scores)
            kept = kept if tokens is None else kept.scatter_(-1, tokens, True)
            scores.masked_fill_(~kept, -torch.inf)
        # A model may exclude a token with a logit of minus infinity; clamping makes its entropy term 0 instead of NaN.
        self._scores = scores.clamp_min_(torch.finfo(torch.float32).min)
        self.probabilities = self._scores.softmax(-1)  # a single fused pass, several times as fast as exp and sum
        # The largest score is 0, so the largest probability is 1 / sum(exp(scores)).
        self._log_sum = -self.probabilities.amax(-1, keepdim=True).log()

    def logps(self, tokens: Tensor) -> Tensor:
        """Return the log-probabilities (R, K) of tokens (R, K)."""
        return self._scores.gather(-1, tokens) - self._log_sum

    def entropy(self) -> Tensor:
        """Return the entropy in nats: (R, 1)."""
        return self._log_sum - torch.linalg.vecdot(self.probabilities, self._scores).unsqueeze(-1)

    def grad_of_entropy(self) -> Tensor:
        """Return the gradients (R, V) of the entropy with respect to logits / temperature: -p (log p + entropy)."""
        return -self.probabilities * (self._scores - self._log_sum + self.entropy())

    def most_likely(self) -> Tensor:
        """Return the most likely token: (R, 1)."""
        return self._scores.argmax(-1, keepdim=True)


class Scored(NamedTuple):
    """Tokens (R, K), their log-probabilities (R, K), and optionally the gradients (R, D) of the latter (K = 1 only)."""

    tokens: Tensor
    logps: Tensor
    slopes: Tensor | None


def token_logps(
    states: Tensor, targets: Tensor, head: Head, temperature: float, truncation: Truncation | None = None
) -> Tensor:
    """Return the log-probabilities (R, K) of targets (R, K) given hidden states (R, D), in float32."""
    if torch.is_grad_enabled() and states.requires_grad and not head.trained and targets.shape[-1] == 1:
        scored = choose_tokens(states.detach(), _those(targets), head, temperature, True, truncation, targets)
        return with_gradient(states, scored, head, temperature)
    logps = []
    for rows in _slices(len(states), head.rows_per_chunk(states.device)):

        def chunk_logps(chunk: Tensor, rows=rows) -> Tensor:
            return _Logps.apply(head.logits(chunk), targets[rows], temperature, truncation)

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
        return with_gradient(states, scored, head, temperature).squeeze(-1), torch.cat(entropies).squeeze(-1)
    for rows in _slices(len(states), head.rows_per_chunk(states.device)):

        def of_chunk(chunk: Tensor, rows=rows) -> tuple[Tensor, Tensor]:
            logits = head.logits(chunk)
            with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
                entropy = _Entropy.apply(logits, targets[rows, None], temperature, truncation)
            return _Logps.apply(logits, targets[rows, None], temperature, truncation), entropy

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
    available, so that backward needs neither the head nor the softmax. Requires K = 1 and a frozen head.
    """
    found = []
    for chunk in _slices(len(states), head.rows_per_chunk(states.device)):
        x = states[chunk]
        with torch.set_grad_enabled(slopes):
            x = x.detach().requires_grad_() if slopes else x
            logits = head.logits(x)
        with torch.no_grad():
            grad_logits = torch.empty_like(logits) if slopes else None
            tokens_known = None if known is None else known[chunk]
            tokens, logps = _choose(
                logits.detach(), choose, chunk.start, temperature, grad_logits, truncation, tokens_known
            )
        slope = torch.autograd.grad(logits, x, grad_logits)[0] if slopes else None
        found.append((tokens, logps, slope))
    return Scored(*(None if parts[0] is None else torch.cat(parts) for parts in zip(*found)))


def _choose(
    logits: Tensor,
    choose: Choose,
    first_row: int,
    temperature: float,
    grad_logits: Tensor | None,
    truncation: Truncation | None,
    known: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return tokens and log-probabilities of a chunk, writing the gradients of the latter to `grad_logits`."""
    tokens, logps = [], []
    for rows in _tiles(logits):
        softmax = Softmax(logits[rows], temperature, truncation, None if known is None else known[rows])
        tokens.append(choose(softmax, slice(first_row + rows.start, first_row + rows.stop)))
        logps.append(softmax.logps(tokens[-1]))
        if grad_logits is not None:
            grad_logits[rows] = _grad_logits(softmax, tokens[-1], torch.ones_like(logps[-1]), temperature)
    return torch.cat(tokens), torch.cat(logps)


def _all_grad_logits(
    logits: Tensor, tokens: Tensor, grad: Tensor, temperature: float, truncation: Truncation | None = None
) -> Tensor:
    """Return the gradients (R, V) of the logits, given the gradients `grad` (R, K) of the log-probabilities."""
    result = torch.empty_like(logits)
    for rows in _tiles(logits):
        softmax = Softmax(logits[rows], temperature, truncation, tokens[rows])
        result[rows] = _grad_logits(softmax, tokens[rows], grad[rows], temperature)
    return result


def _grad_logits(softmax: Softmax, tokens: Tensor, grad: Tensor, temperature: float) -> Tensor:
    """Return the same gradients from the softmax of the logits, whose probabilities are overwritten."""
    grad = grad / temperature
    result = softmax.probabilities.mul_(-grad.sum(-1, keepdim=True))
    return result.scatter_add_(-1, tokens, grad.to(result.dtype))


def with_gradient(states: Tensor, scored: Scored, head: Head, temperature: float) -> Tensor:
    """Return the log-probabilities of `scored`, differentiable with respect to `states` (R, D)."""
    if scored.slopes is not None:
        return _WithSlopes.apply(states, scored.logps, scored.slopes)
    return _RunInBackward.apply(states, scored.tokens, scored.logps, head, temperature, *head.trained)


class _WithSlopes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, logps, slopes):
        ctx.save_for_backward(slopes)
        return logps.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (slopes,) = ctx.saved_tensors
        return slopes * grad.to(slopes.dtype), None, None


class _RunInBackward(torch.autograd.Function):
    """Precomputed log-probabilities; the head runs in backward only. For heads without randomness."""

    @staticmethod
    def forward(ctx, states, tokens, logps, head, temperature, *trained):
        ctx.save_for_backward(states, tokens, *trained)
        device = states.device.type
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        ctx.rest = head, temperature, autocast
        return logps.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        states, tokens, *trained = ctx.saved_tensors
        head, temperature, (enabled, dtype) = ctx.rest
        grad_states = torch.empty_like(states)
        grads = [torch.zeros_like(parameter) for parameter in trained]
        for rows in _slices(len(states), head.rows_per_chunk(states.device)):
            x = states[rows].detach().requires_grad_()
            with torch.enable_grad(), torch.autocast(x.device.type, dtype, enabled):
                logits = head.logits(x)
            grad_logits = _all_grad_logits(logits.detach(), tokens[rows], grad[rows], temperature)
            grad_states[rows], *found = torch.autograd.grad(logits, (x, *trained), grad_logits, allow_unused=True)
            for total, part in zip(grads, found):
                if part is not None:
                    total += part
        return grad_states, None, None, None, None, *grads


class _Logps(torch.autograd.Function):
    """Log-probabilities (R, K) of tokens (R, K) from logits (R, V); the softmax is recomputed in backward."""

    @staticmethod
    def forward(ctx, logits, tokens, *distribution):
        ctx.save_for_backward(logits, tokens)
        ctx.distribution = distribution  # temperature, truncation
        found = (Softmax(logits[rows], *distribution, tokens[rows]).logps(tokens[rows]) for rows in _tiles(logits))
        return torch.cat(list(found))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, tokens = ctx.saved_tensors
        return _all_grad_logits(logits, tokens, grad, *ctx.distribution), None, None, None


class _Entropy(torch.autograd.Function):
    """Entropies (R, 1) of the distributions given by logits (R, V); the softmax is recomputed in backward."""

    @staticmethod
    def forward(ctx, logits, tokens, *distribution):
        ctx.save_for_backward(logits, tokens)
        ctx.distribution = distribution  # temperature, truncation
        found = (Softmax(logits[rows], *distribution, tokens[rows]).entropy() for rows in _tiles(logits))
        return torch.cat(list(found))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, tokens = ctx.saved_tensors
        result = torch.empty_like(logits)
        for rows in _tiles(logits):
            softmax = Softmax(logits[rows], *ctx.distribution, tokens[rows])
            result[rows] = softmax.grad_of_entropy() * grad[rows] / ctx.distribution[0]
        return result, None, None, None


def _those(targets: Tensor) -> Choose:
    return lambda softmax, rows: targets[rows]


def _tiles(logits: Tensor) -> list[slice]:
    return _slices(len(logits), max(1, _of_device(_SOFTMAX_PER_TILE, logits.device) // logits.shape[-1]))


def _of_device(sizes: dict[str, int], device: torch.device) -> int:
    return sizes["cpu" if device.type == "cpu" else "other"]


def _slices(count: int, size: int) -> list[slice]:
    """Return slices of `size` that cover `count` rows; for no rows, one empty slice, to keep the graph connected."""
    return [slice(start, min(start + size, count)) for start in range(0, max(count, 1), size)]
