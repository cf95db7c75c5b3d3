"""Log-probabilities of tokens from hidden states: the head runs where a token is scored, a few rows at a time.

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

# Logits held at once: on CPU little enough (32 MiB in float32) for the allocator to use the same memory again, else it
# is taken from the system anew for every chunk.
LOGITS_PER_CHUNK = {"cpu": 2**23, "other": 2**25}
# Numbers of a softmax that are worked on at once: on CPU what stays in the processor's cache.
_SOFTMAX_PER_TILE = {"cpu": 2**18, "other": 2**25}

Choose = Callable[["Softmax", slice], Tensor]  # of some rows -> tokens (rows, K)


@dataclass(frozen=True)
class Head:
    """What turns hidden states (R, D) into logits (R, V), and those of its parameters that are trained."""

    logits: Callable[[Tensor], Tensor]
    vocab_size: int
    trained: tuple[Tensor, ...]

    def rows_per_chunk(self, device: torch.device) -> int:
        """How many rows of logits are made at once."""
        return max(16, _of_device(LOGITS_PER_CHUNK, device) // self.vocab_size)


class Softmax:
    """softmax(logits / temperature) of logits (R, V), in float32: what is sampled is what is scored.

    probabilities (R, V) are the softmax itself.
    """

    def __init__(self, logits: Tensor, temperature: float):
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        if temperature != 1:
            scores /= temperature
        scores -= scores.amax(-1, keepdim=True)
        # Where a model rules a token out with minus infinity, its weight is 0 and so is its share of the entropy.
        self._scores = scores.clamp_min_(torch.finfo(torch.float32).min)
        self.probabilities = self._scores.softmax(-1)  # one pass of PyTorch's, several times as fast as exp and a sum
        # The largest score is 0, so the largest probability is 1 / sum(exp(scores)).
        self._log_sum = -self.probabilities.amax(-1, keepdim=True).log()

    def logps(self, tokens: Tensor) -> Tensor:
        """Log-probabilities of tokens (R, K)."""
        return self._scores.gather(-1, tokens) - self._log_sum

    def entropy(self) -> Tensor:
        """In nats: (R, 1)."""
        return self._log_sum - torch.linalg.vecdot(self.probabilities, self._scores).unsqueeze(-1)

    def most_likely(self) -> Tensor:
        """The most likely token: (R, 1)."""
        return self._scores.argmax(-1, keepdim=True)


class Scored(NamedTuple):
    """Tokens (R, K), their log-probabilities (R, K), and where asked for the latter's gradients (R, D), with K = 1."""

    tokens: Tensor
    logps: Tensor
    slopes: Tensor | None


def token_logps(states: Tensor, targets: Tensor, head: Head, temperature: float) -> Tensor:
    """Log-probabilities (R, K) of targets (R, K) after hidden states (R, D), float32."""
    if torch.is_grad_enabled() and states.requires_grad and not head.trained and targets.shape[-1] == 1:
        scored = choose_tokens(states.detach(), _those(targets), head, temperature, slopes=True)
        return with_gradient(states, scored, head, temperature)
    logps = []
    for rows in _slices(len(states), head.rows_per_chunk(states.device)):

        def chunk_logps(chunk: Tensor, rows=rows) -> Tensor:
            return _Logps.apply(head.logits(chunk), targets[rows], temperature)

        if torch.is_grad_enabled():
            # The head runs again in backward, with the random state kept, since an adapted head may drop out.
            logps.append(checkpoint(chunk_logps, states[rows], use_reentrant=False))
        else:
            logps.append(chunk_logps(states[rows]))
    return torch.cat(logps)


def choose_tokens(states: Tensor, choose: Choose, head: Head, temperature: float, slopes: bool = False) -> Scored:
    """Tokens that `choose` picks from the distributions after states (R, D), and their log-probabilities.

    With `slopes`, the gradients of the log-probabilities with respect to the states are computed while the softmax is
    at hand, so that neither the head nor the softmax is needed in backward; for K = 1 and a frozen head.
    """
    found = []
    for chunk in _slices(len(states), head.rows_per_chunk(states.device)):
        x = states[chunk]
        with torch.set_grad_enabled(slopes):
            x = x.detach().requires_grad_() if slopes else x
            logits = head.logits(x)
        with torch.no_grad():
            grad_logits = torch.empty_like(logits) if slopes else None
            tokens, logps = _choose(logits.detach(), choose, chunk.start, temperature, grad_logits)
        slope = torch.autograd.grad(logits, x, grad_logits)[0] if slopes else None
        found.append((tokens, logps, slope))
    return Scored(*(None if parts[0] is None else torch.cat(parts) for parts in zip(*found)))


def _choose(
    logits: Tensor, choose: Choose, first_row: int, temperature: float, grad_logits: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities of a chunk; the gradients of the latter are written to `grad_logits`."""
    tokens, logps = [], []
    for rows in _tiles(logits):
        softmax = Softmax(logits[rows], temperature)
        tokens.append(choose(softmax, slice(first_row + rows.start, first_row + rows.stop)))
        logps.append(softmax.logps(tokens[-1]))
        if grad_logits is not None:
            grad_logits[rows] = _grad_logits(softmax, tokens[-1], torch.ones_like(logps[-1]), temperature)
    return torch.cat(tokens), torch.cat(logps)


def _all_grad_logits(logits: Tensor, tokens: Tensor, grad: Tensor, temperature: float) -> Tensor:
    """Gradients (R, V) of logits whose tokens' log-probabilities have gradients `grad` (R, K)."""
    result = torch.empty_like(logits)
    for rows in _tiles(logits):
        result[rows] = _grad_logits(Softmax(logits[rows], temperature), tokens[rows], grad[rows], temperature)
    return result


def _grad_logits(softmax: Softmax, tokens: Tensor, grad: Tensor, temperature: float) -> Tensor:
    """The same by the logits' softmax, which is used up."""
    grad = grad / temperature
    result = softmax.probabilities.mul_(-grad.sum(-1, keepdim=True))
    return result.scatter_add_(-1, tokens, grad.to(result.dtype))


def with_gradient(states: Tensor, scored: Scored, head: Head, temperature: float) -> Tensor:
    """The log-probabilities of `scored`, with their gradient: states (R, D) are those they come from, in a graph."""
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
    """Log-probabilities that are known already; the head runs in backward. For heads without randomness."""

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
    """Log-probabilities (R, K) of tokens (R, K) by logits (R, V), of which no softmax is kept."""

    @staticmethod
    def forward(ctx, logits, tokens, temperature):
        ctx.save_for_backward(logits, tokens)
        ctx.temperature = temperature
        return torch.cat([Softmax(logits[rows], temperature).logps(tokens[rows]) for rows in _tiles(logits)])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, tokens = ctx.saved_tensors
        return _all_grad_logits(logits, tokens, grad, ctx.temperature), None, None


def _those(targets: Tensor) -> Choose:
    return lambda softmax, rows: targets[rows]


def _tiles(logits: Tensor) -> list[slice]:
    return _slices(len(logits), max(1, _of_device(_SOFTMAX_PER_TILE, logits.device) // logits.shape[-1]))


def _of_device(sizes: dict[str, int], device: torch.device) -> int:
    return sizes["cpu" if device.type == "cpu" else "other"]


def _slices(count: int, size: int) -> list[slice]:
    """Slices of `size` that cover `count` rows; no rows are one empty slice, which keeps a graph whole."""
    return [slice(start, min(start + size, count)) for start in range(0, max(count, 1), size)]
