"""Gradients of log-probabilities and entropies without keeping a softmax: autograd functions that recompute it.

R  scored rows   D  hidden size   V  vocabulary   K  tokens scored in each row
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ebft.prefix.sampling import Truncation
from ebft.prefix.softmax import Softmax, slices, tiles


def all_grad_logits(
    logits: Tensor, tokens: Tensor, grad: Tensor, temperature: float, truncation: Truncation | None = None
) -> Tensor:
    """Return the gradients (R, V) of the logits, given the gradients `grad` (R, K) of the log-probabilities."""
    result = torch.empty_like(logits)
    for rows in tiles(logits):
        softmax = Softmax(logits[rows], temperature, truncation, tokens[rows])
        result[rows] = grad_of_logits(softmax, tokens[rows], grad[rows], temperature)
    return result


def grad_of_logits(softmax: Softmax, tokens: Tensor, grad: Tensor, temperature: float) -> Tensor:
    """Return the same gradients from the softmax of the logits, whose probabilities are overwritten."""
    grad = grad / temperature
    result = softmax.probabilities.mul_(-grad.sum(-1, keepdim=True))
    return result.scatter_add_(-1, tokens, grad.to(result.dtype))


class WithSlopes(torch.autograd.Function):
    """Log-probabilities (R, 1) whose gradients (R, D) with respect to hidden states are known."""

    @staticmethod
    def forward(ctx, states, logps, slopes):
        ctx.save_for_backward(slopes)
        return logps.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (slopes,) = ctx.saved_tensors
        return slopes * grad.to(slopes.dtype), None, None


class RunInBackward(torch.autograd.Function):
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
        for rows in slices(len(states), head.rows_per_chunk(states.device)):
            x = states[rows].detach().requires_grad_()
            with torch.enable_grad(), torch.autocast(x.device.type, dtype, enabled):
                logits = head.logits(x)
            grad_logits = all_grad_logits(logits.detach(), tokens[rows], grad[rows], temperature)
            grad_states[rows], *found = torch.autograd.grad(logits, (x, *trained), grad_logits, allow_unused=True)
            for total, part in zip(grads, found):
                if part is not None:
                    total += part
        return grad_states, None, None, None, None, *grads


class Logps(torch.autograd.Function):
    """Log-probabilities (R, K) of tokens (R, K) from logits (R, V); the softmax is recomputed in backward."""

    @staticmethod
    def forward(ctx, logits, tokens, *distribution):
        ctx.save_for_backward(logits, tokens)
        ctx.distribution = distribution  # temperature, truncation
        found = (Softmax(logits[rows], *distribution, tokens[rows]).logps(tokens[rows]) for rows in tiles(logits))
        return torch.cat(list(found))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, tokens = ctx.saved_tensors
        return all_grad_logits(logits, tokens, grad, *ctx.distribution), None, None, None


class Entropy(torch.autograd.Function):
    """Entropies (R, 1) of the distributions given by logits (R, V); the softmax is recomputed in backward."""

    @staticmethod
    def forward(ctx, logits, tokens, *distribution):
        ctx.save_for_backward(logits, tokens)
        ctx.distribution = distribution  # temperature, truncation
        found = (Softmax(logits[rows], *distribution, tokens[rows]).entropy() for rows in tiles(logits))
        return torch.cat(list(found))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, tokens = ctx.saved_tensors
        result = torch.empty_like(logits)
        for rows in tiles(logits):
            softmax = Softmax(logits[rows], *ctx.distribution, tokens[rows])
            result[rows] = softmax.grad_of_entropy() * grad[rows] / ctx.distribution[0]
        return result, None, None, None
