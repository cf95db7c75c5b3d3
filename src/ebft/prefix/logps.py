"""Log-probabilities of tokens from hidden states: the head is applied to scored positions only, in chunks of rows.

R  scored rows   D  hidden size   V  vocabulary   K  tokens scored in each row
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ebft.models.causal_lm import PLAIN, report_product
from ebft.prefix.cpu import cpu_matmul, cpu_product
from ebft.prefix.sampling import Softmax, Truncation, of_device, slices, tiles

Result = TypeVar("Result")

# Tokens of the vocabulary, and rows, whose logits are computed at once in backward of a linear head.
_TOKENS_PER_BLOCK = {"cpu": 2048, "other": 8192}
_ROWS_PER_BLOCK = {"cpu": 1024, "other": 4096}

_HALF = (torch.bfloat16, torch.float16)


def head_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype to which the inputs of a linear layer with this weight are rounded."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def head_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `linear` of x (R, D), weight (V, D) and bias (V,), without autograd. 16-bit inputs give float32 results.

    A logit of 20 rounded to bfloat16 is off by up to 0.06, and with it the log-probability. Matrix units sum products
    of 16-bit numbers in float32 in any case, so that these results take no longer on a GPU.
    """
    if x.dtype not in _HALF:
        with cpu_matmul(x.device):
            return F.linear(x, weight, bias)
    if _sums_in_float32(x.device.type, x.dtype):
        result = torch.mm(x, weight.mT, out_dtype=torch.float32)
    else:  # products of 16-bit numbers are exact in float32
        x, result = x.float(), x.new_empty(len(x), len(weight), dtype=torch.float32)
        for block in slices(len(weight), of_device(_TOKENS_PER_BLOCK, x.device)):
            with torch.autocast(x.device.type, enabled=False), cpu_matmul(x.device):
                result[:, block] = F.linear(x, weight[block].float())
    return result if bias is None else result.add_(bias)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` of matrices, without autograd; in float32 if they have 16 bits and that takes no longer."""
    if left.dtype in _HALF and _sums_in_float32(left.device.type, left.dtype):
        return torch.mm(left, right, out_dtype=torch.float32)
    return cpu_product(left, right)


@cache
def _sums_in_float32(device_type: str, dtype: torch.dtype) -> bool:
    """Whether a device's library of matrix products returns the float32 sums of 16-bit products; CPU has none."""
    one = torch.ones(1, 1, device=device_type, dtype=dtype)
    try:
        return torch.mm(one, one, out_dtype=torch.float32).dtype == torch.float32
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
        return False


class Float32Results(TorchFunctionMode):
    """Linear layers return the float32 results of products whose inputs have 16 bits, see `head_linear`.

    The copies of weights that autocast rounds live as long as this object, or until the weights change.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rounded: dict[int, tuple[Tensor, int, Tensor]] = {}  # by the id of a weight: it, its version, the copy

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear and not kwargs:
            x, weight, bias = (*args, None)[:3]
            dtype = head_dtype(weight)
            if dtype in _HALF and type(weight) in PLAIN and weight.is_floating_point():
                rounded = weight
                if weight.dtype != dtype:
                    kept = self._rounded.get(id(weight))
                    if kept is None or kept[1] != weight._version:
                        kept = self._rounded[id(weight)] = weight, weight._version, weight.detach().to(dtype)
                    rounded = kept[2]
                return _Float32Linear.apply(x, weight, bias, rounded)
        return func(*args, **(kwargs or {}))


class _Float32Linear(torch.autograd.Function):
    """`head_linear` of x (..., D), differentiable. `rounded`: the weight in the 16-bit dtype of the product."""

    @staticmethod
    def forward(ctx, x, weight, bias, rounded):
        rows = x.flatten(0, -2).to(rounded.dtype)
        ctx.save_for_backward(rows, rounded)
        ctx.like = [None if each is None else (each.shape, each.dtype) for each in (x, weight, bias)]
        return head_linear(rows, rounded, bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        exact = grad.flatten(0, -2)
        grad = exact.to(x.dtype)
        products = lambda: _product(grad, weight), lambda: _product(grad.mT, x), lambda: exact.sum(0)
        needed = zip(ctx.needs_input_grad, products, ctx.like)
        return *(product().view(like[0]).to(like[1]) if needs else None for needs, product, like in needed), None


def all_grad_logits(
    logits: Tensor,
    tokens: Tensor,
    grad: Tensor,
    temperature: float,
    truncation: Truncation | None = None,
    is_entropy: bool = False,
) -> Tensor:
    """Return the gradients (R, V) of the logits from gradients of log-probabilities (R, K), or entropies (R, 1)."""
    result = torch.empty_like(logits)
    for rows in tiles(logits):
        softmax = Softmax(logits[rows], temperature, truncation, tokens[rows])
        if is_entropy:
            result[rows] = softmax.grad_of_entropy() * grad[rows] / temperature
        else:
            result[rows] = grad_of_logits(softmax.probabilities, tokens[rows], grad[rows], temperature)
    return result


def grad_of_logits(probabilities: Tensor, tokens: Tensor, grad: Tensor, temperature: float) -> Tensor:
    """Return the same gradients from the softmax of the logits, which is overwritten."""
    grad = grad / temperature
    result = probabilities.mul_(-grad.sum(-1, keepdim=True))
    return result.scatter_add_(-1, tokens, grad.to(result.dtype))


class Slopes(NamedTuple):
    """Gradients (E, D) of log-probabilities with respect to hidden states (R, D), one for each distinct token of a row.

    index (R, K): the place of each token among the E. row (E,): the row that each belongs to, in order.
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


def distinct_tokens(tokens: Tensor, several: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return row and column (E,) of each distinct token of a row, in order, and which one each token is: (R, K).

    With `several`, without looking at the tokens, which a GPU would be waited for: all K of the first `several` rows,
    and the first one of the others, which repeat it.
    """
    rows, columns = tokens.shape
    several = 0 if columns == 1 else several
    if several is not None:
        several = min(several, rows)
        row, column = torch.arange(rows, device=tokens.device), torch.arange(columns, device=tokens.device)
        all_of, one_of = row[:several], row[several:]
        number = [all_of[:, None] * columns + column, (one_of[:, None] + several * (columns - 1)).expand(-1, columns)]
        return (
            torch.cat([all_of.repeat_interleave(columns), one_of]),
            torch.cat([column.repeat(several), torch.zeros_like(one_of)]),
            torch.cat(number),
        )
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
    """Precomputed log-probabilities (R, K) of a linear head, whose backward runs one block of tokens at a time.

    The logits of a block suffice for its probabilities, since log_sums (R, 1), the log-sum-exp of logits / temperature
    over the vocabulary, are known. The gradient of a block's weights is thus computed at once, and is no sum over
    chunks of rows, which would be read and written for each chunk.
    """

    @staticmethod
    def forward(ctx, states, tokens, logps, log_sums, temperature, weight, bias):
        ctx.save_for_backward(states, tokens, log_sums, weight, bias)
        ctx.temperature = temperature
        ctx.parameter = weight  # whose identity is lost among saved tensors if a checkpoint recomputes them
        ctx.dtype = head_dtype(weight)
        return logps.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        states, tokens, log_sums, weight, bias = ctx.saved_tensors
        needs_weight, needs_bias = ctx.needs_input_grad[5:]
        report_product(ctx.parameter, (2 + needs_weight) * len(states))
        x, grad, exact = states.to(ctx.dtype), grad / ctx.temperature, torch.promote_types(ctx.dtype, torch.float32)
        grad_states = torch.zeros_like(states, dtype=exact)
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        for block in slices(len(weight), of_device(_TOKENS_PER_BLOCK, x.device)):
            w, b = weight[block].to(ctx.dtype), None if bias is None else bias[block]
            of_weight, of_bias = torch.zeros_like(w, dtype=exact), x.new_zeros(len(w), dtype=exact)
            for rows in slices(len(x), of_device(_ROWS_PER_BLOCK, x.device)):
                logits = head_linear(x[rows], w, b)
                probabilities = (logits.to(exact) / ctx.temperature).sub_(log_sums[rows]).exp_()
                grad_logits = probabilities.mul_(-grad[rows].sum(-1, keepdim=True))
                index = tokens[rows] - block.start
                of_others = (index < 0) | (index >= len(w))
                grad_logits.scatter_add_(-1, index.clamp(0, len(w) - 1), grad[rows].masked_fill(of_others, 0).to(exact))
                if needs_bias:
                    of_bias += grad_logits.sum(0)
                grad_logits = grad_logits.to(ctx.dtype)
                grad_states[rows] += _product(grad_logits, w)
                if needs_weight:
                    of_weight += _product(grad_logits.mT, x[rows])
            if needs_weight:
                grad_weight[block] = of_weight
            if needs_bias:
                grad_bias[block] = of_bias
        return grad_states.to(states.dtype), None, None, None, None, grad_weight, grad_bias


class FromLogits(torch.autograd.Function):
    """Log-probabilities (R, K) of tokens (R, K) from logits (R, V), or entropies (R, 1).

    The softmax is recomputed in backward.
    """

    @staticmethod
    def forward(ctx, logits, tokens, temperature, truncation, is_entropy=False):
        ctx.save_for_backward(logits, tokens)
        ctx.rest = temperature, truncation, is_entropy

        def of(rows: slice) -> Tensor:  # so that a softmax is freed before the next one
            softmax = Softmax(logits[rows], temperature, truncation, tokens[rows])
            return softmax.entropy() if is_entropy else softmax.logps(tokens[rows])

        return torch.cat([of(rows) for rows in tiles(logits)])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return all_grad_logits(*ctx.saved_tensors, grad, *ctx.rest), None, None, None, None


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
        missing = [columns - part.tokens.shape[1] for part in parts]
        slopes = [part.slopes for part in parts if part.slopes is not None]
        return cls(
            torch.cat(
                [torch.cat([x.tokens, x.tokens[:, :1].expand(-1, count)], 1) for x, count in zip(parts, missing)]
            ),
            torch.cat([F.pad(part.logps, (0, count)) for part, count in zip(parts, missing)]),
            torch.cat([part.log_sums for part in parts]),
            Slopes.joined(slopes, columns) if len(slopes) == len(parts) else None,
        )


def token_logps(
    states: Tensor,
    targets: Tensor,
    head: Head,
    temperature: float,
    truncation: Truncation | None = None,
    several: int | None = None,
) -> Tensor:
    """Return the log-probabilities (R, K) of targets (R, K) given hidden states (R, D), in float32.

    `several`: as in `distinct_tokens`, if it is known.
    """
    has_gradient = torch.is_grad_enabled()
    needs_states = has_gradient and states.requires_grad
    slopes = needs_states and head.gives_slopes(targets.shape[-1])
    if slopes or (has_gradient and head.linear is not None and head.trained and truncation is None):
        choose = lambda softmax, rows: targets[rows]
        scored = choose_tokens(states.detach(), choose, head, temperature, slopes, truncation, targets, several)
        return with_gradient(states, scored, head, temperature, truncation)
    if needs_states and head.gives_slopes(1) and truncation is None:  # rows with several tokens are repeated
        row, column, index = distinct_tokens(targets, several)
        return token_logps(states[row], targets[row, column, None], head, temperature).squeeze(-1)[index]

    def of_chunk(chunk: Tensor, rows: slice) -> Tensor:
        return FromLogits.apply(head.logits(chunk), targets[rows], temperature, truncation)

    return torch.cat(_in_chunks(of_chunk, states, head))


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
    targets = targets[:, None]
    if torch.is_grad_enabled() and states.requires_grad and not head.trained and not entropy_gradient:
        entropies = []

        def choose(softmax: Softmax, rows: slice) -> Tensor:
            entropies.append(softmax.entropy())
            return targets[rows]

        scored = choose_tokens(states.detach(), choose, head, temperature, True, truncation, targets)
        logps = with_gradient(states, scored, head, temperature, truncation)
        return logps.squeeze(-1), torch.cat(entropies).squeeze(-1)

    def of_chunk(chunk: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        logits = head.logits(chunk)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = FromLogits.apply(logits, targets[rows], temperature, truncation, True)
        return FromLogits.apply(logits, targets[rows], temperature, truncation), entropy

    logps, entropy = (torch.cat(each).squeeze(-1) for each in zip(*_in_chunks(of_chunk, states, head)))
    return logps, entropy


def _in_chunks(function: Callable[[Tensor, slice], Result], states: Tensor, head: Head) -> list[Result]:
    """Return what the function returns for the states of each chunk, and the chunk's rows. Backward runs it again, with
    the same random state, since an adapted head may use dropout."""
    chunks = slices(len(states), head.rows_per_chunk(states.device))
    if torch.is_grad_enabled():
        return [checkpoint(function, states[rows], rows, use_reentrant=False) for rows in chunks]
    return [function(states[rows], rows) for rows in chunks]


def choose_tokens(
    states: Tensor,
    choose: Choose,
    head: Head,
    temperature: float,
    slopes: bool = False,
    truncation: Truncation | None = None,
    known: Tensor | None = None,
    several: int | None = None,
) -> Scored:
    """Return the tokens that `choose` selects from the distributions given states (R, D), with log-probabilities.

    `known` (R, K) are these tokens if they are known, see `Softmax`; `several`: as in `distinct_tokens`.

    With `slopes`, the gradients of the log-probabilities with respect to the states are computed while the softmax is
    available, so that backward needs neither the head nor the softmax, see `Head.gives_slopes`.
    """
    found = []
    differentiates = slopes and head.linear is None
    for chunk in slices(len(states), head.rows_per_chunk(states.device)):
        with torch.set_grad_enabled(differentiates):
            x = states[chunk].detach().requires_grad_() if differentiates else states[chunk]
            with_graph = head.logits(x)
        logits, grad_logits, count = with_graph.detach(), None, 0
        dtype = logits.dtype if head.linear is None else head_dtype(head.linear.weight)  # of the gradients of logits
        tokens, logps, log_sums, numbers, edges = [], [], [], [], []
        with torch.no_grad():
            for rows in tiles(logits):
                first = chunk.start + rows.start
                of_all = slice(first, chunk.start + rows.stop)
                softmax = Softmax(logits[rows], temperature, truncation, None if known is None else known[of_all])
                tokens.append(of_tile := choose(softmax, of_all))
                logps.append(softmax.logps(of_tile))
                log_sums.append(softmax.log_sum_exp())
                if not slopes:
                    continue
                if grad_logits is None:  # room for all tokens; the distinct ones are used
                    grad_logits = logits.new_empty(of_tile.shape[1] * len(logits), logits.shape[1], dtype=dtype)
                row, column, number = distinct_tokens(of_tile, None if several is None else max(0, several - first))
                probabilities = softmax.probabilities if len(row) == len(of_tile) else softmax.probabilities[row]
                distinct = of_tile[row, column].unsqueeze(1)
                ones = torch.ones_like(distinct, dtype=logps[-1].dtype)
                grad_logits[count : count + len(row)] = grad_of_logits(probabilities, distinct, ones, temperature)
                numbers.append(number + count)
                edges.append(row + rows.start)
                count += len(row)
        del softmax  # before the next chunk has its logits
        of_slopes = None
        if slopes:
            del probabilities
            if differentiates:
                values = torch.autograd.grad(with_graph, x, grad_logits[:count])[0]
            else:
                report_product(head.linear.weight, count)
                values = _product(grad_logits[:count], head.linear.weight.to(dtype)).to(x.dtype)
            of_slopes = Slopes(values, torch.cat(numbers), torch.cat(edges))
        found.append(Scored(torch.cat(tokens), torch.cat(logps), torch.cat(log_sums), of_slopes))
    return Scored.joined(found)


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
