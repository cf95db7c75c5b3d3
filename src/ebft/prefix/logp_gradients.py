"""Gradients of log-probabilities and entropies without keeping a softmax: autograd functions that recompute it.

R  scored rows   D  hidden size   V  vocabulary   K  tokens scored in each row
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ebft.models.products import fast_products, product, report
from ebft.prefix.sampling import Truncation
from ebft.prefix.softmax import Softmax, of_device, slices, tiles

# Tokens of the vocabulary, and rows, whose logits are computed at once in backward of a linear head.
_TOKENS_PER_BLOCK = {"cpu": 2048, "other": 8192}
_ROWS_PER_BLOCK = {"cpu": 1024, "other": 4096}


def all_grad_logits(
    logits: Tensor, tokens: Tensor, grad: Tensor, temperature: float, truncation: Truncation | None = None
) -> Tensor:
    """Return the gradients (R, V) of the logits, given the gradients `grad` (R, K) of the log-probabilities."""
    result = torch.empty_like(logits)
    for rows in tiles(logits):
        softmax = Softmax(logits[rows], temperature, truncation, tokens[rows])
        result[rows] = grad_of_logits(softmax.probabilities, tokens[rows], grad[rows], temperature)
    return result


def grad_of_logits(probabilities: Tensor, tokens: Tensor, grad: Tensor, temperature: float) -> Tensor:
    """Return the same gradients from the softmax of the logits, which is overwritten."""
    grad = grad / temperature
    result = probabilities.mul_(-grad.sum(-1, keepdim=True))
    return result.scatter_add_(-1, tokens, grad.to(result.dtype))


class Slopes(NamedTuple):
    """Gradients (E, D) of log-probabilities with respect to hidden states (R, D), one for each distinct token of a row.

    index (R, K): which of them is that of each token. row (E,): the row that each belongs to, in order.
    """

    values: Tensor
    index: Tensor
    row: Tensor

    @classmethod
    def joined(cls, parts: list[Slopes], columns: int) -> Slopes:
        """Return the slopes of all rows, for K = `columns` tokens in each; tokens that a part lacks have any slope."""
        index, row, edges, rows = [], [], 0, 0
        for part in parts:
            index.append(F.pad(part.index, (0, columns - part.index.shape[1])) + edges)
            row.append(part.row + rows)
            edges, rows = edges + len(part.values), rows + len(part.index)
        return cls(torch.cat([part.values for part in parts]), torch.cat(index), torch.cat(row))


def distinct_tokens(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return row and column (E,) of each distinct token of a row, in order, and which one each token is: (R, K)."""
    first = (tokens.unsqueeze(2) == tokens.unsqueeze(1)).int().argmax(-1)  # the first column with the same token
    is_first = first == torch.arange(tokens.shape[1], device=tokens.device)
    number = is_first.flatten().cumsum(0).view_as(tokens) - 1
    return *is_first.nonzero(as_tuple=True), number.gather(1, first)


class WithSlopes(torch.autograd.Function):
    """Log-probabilities (R, K) whose gradients with respect to hidden states (R, D) are known, see `Slopes`."""

    @staticmethod
    def forward(ctx, states, logps, values, index, row):
        ctx.save_for_backward(values, index, row)
        ctx.like = states.shape
        return logps.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        values, index, row = ctx.saved_tensors
        grad = grad.new_zeros(len(values)).index_add_(0, index.flatten(), grad.flatten())
        of_tokens = values * grad.unsqueeze(1).to(values.dtype)
        if len(values) == ctx.like[0]:  # every row has at least one
            return of_tokens, None, None, None, None
        return values.new_zeros(ctx.like).index_add_(0, row, of_tokens), None, None, None, None


class RunInBackward(torch.autograd.Function):
    """Precomputed log-probabilities; the head runs in backward only. For heads without randomness.

    With `truncation`, backward finds the kept tokens again. The sampled ones are always among them, see `Softmax`.
    """

    @staticmethod
    def forward(ctx, states, tokens, logps, head, temperature, truncation, *trained):
        ctx.save_for_backward(states, tokens, *trained)
        device = states.device.type
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        ctx.rest = head, temperature, truncation, autocast
        return logps.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        states, tokens, *trained = ctx.saved_tensors
        head, temperature, truncation, (enabled, dtype) = ctx.rest
        grad_states = torch.empty_like(states)
        grads = [torch.zeros_like(parameter) for parameter in trained]
        for rows in slices(len(states), head.rows_per_chunk(states.device)):
            x = states[rows].detach().requires_grad_()
            with torch.enable_grad(), torch.autocast(x.device.type, dtype, enabled):
                logits = head.logits(x)
            grad_logits = all_grad_logits(logits.detach(), tokens[rows], grad[rows], temperature, truncation)
            grad_states[rows], *found = torch.autograd.grad(logits, (x, *trained), grad_logits, allow_unused=True)
            for total, part in zip(grads, found):
                if part is not None:
                    total += part
        return grad_states, None, None, None, None, None, *grads


class Linear(NamedTuple):
    """The weights (V, D) and the bias (V,) of a linear layer from hidden states to logits."""

    weight: Tensor
    bias: Tensor | None


class OfLinearHead(torch.autograd.Function):
    """Precomputed log-probabilities (R, K) of a linear head, of which backward runs one block of tokens at a time.

    The logits of a block suffice for its probabilities, since log_sums (R, 1), the log-sum-exp of logits / temperature
    over the vocabulary, are known. The gradient of a block's weights is thus computed at once, and is no sum over
    chunks of rows, which would be read and written for each of them.
    """

    @staticmethod
    def forward(ctx, states, tokens, logps, log_sums, temperature, weight, bias):
        ctx.save_for_backward(states, tokens, log_sums, weight, bias)
        device = states.device.type
        ctx.temperature = temperature
        ctx.parameter = weight  # whose identity is lost among saved tensors if a checkpoint recomputes them
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        return logps.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        states, tokens, log_sums, weight, bias = ctx.saved_tensors
        needs_weight, needs_bias = ctx.needs_input_grad[5:]
        report(ctx.parameter, (2 + needs_weight) * len(states))
        x, grad, exact = states.to(ctx.dtype), grad / ctx.temperature, torch.promote_types(ctx.dtype, torch.float32)
        grad_states = torch.zeros_like(states, dtype=exact)
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        for block in slices(len(weight), of_device(_TOKENS_PER_BLOCK, x.device)):
            w, b = weight[block].to(ctx.dtype), None if bias is None else bias[block].to(ctx.dtype)
            of_weight, of_bias = torch.zeros_like(w, dtype=exact), x.new_zeros(len(w), dtype=exact)
            for rows in slices(len(x), of_device(_ROWS_PER_BLOCK, x.device)):
                with fast_products():
                    logits = F.linear(x[rows], w, b)
                probabilities = (logits.to(exact) / ctx.temperature).sub_(log_sums[rows]).exp_()
                grad_logits = probabilities.mul_(-grad[rows].sum(-1, keepdim=True))
                index = tokens[rows] - block.start
                of_others = (index < 0) | (index >= len(w))
                grad_logits.scatter_add_(-1, index.clamp(0, len(w) - 1), grad[rows].masked_fill(of_others, 0).to(exact))
                if needs_bias:
                    of_bias += grad_logits.sum(0)
                grad_logits = grad_logits.to(ctx.dtype)
                grad_states[rows] += product(grad_logits, w)
                if needs_weight:
                    of_weight += product(grad_logits.mT, x[rows])
            if needs_weight:
                grad_weight[block] = of_weight
            if needs_bias:
                grad_bias[block] = of_bias
        return grad_states.to(states.dtype), None, None, None, None, grad_weight, grad_bias


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
