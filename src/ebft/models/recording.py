"""Reuse of the linear layers' outputs from sampling in the training forward pass.

Rollouts are sampled without gradients, token by token. The training forward pass then runs over [documents | rollouts]
at once. Where it multiplies by a weight by which the sampling passes already multiplied the same rows, it reuses their
products and computes only what the backward pass needs. No product is computed twice, and the backward pass computes
one product of all rows for each gradient instead of one for each decoded token.

    S  document tokens    C  tokens of all sampling steps, at most `most`    P = S + C    I, O  features
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ebft.models.products import product


@dataclass
class _Product:
    """Products of one weight, in the row order of the training forward pass: the first `rows` of (1, S + most, O)."""

    weight: Tensor  # kept alive, so that its id is not reused
    values: Tensor
    rows: int


class Recording:
    """Products of linear layers by their weight, from the passes that sampled the rollouts of a layout.

    The training forward pass reads the documents' tokens, followed by those of each step; `most` limits the latter.
    """

    def __init__(self, document_tokens: int, most: int):
        self.most_tokens, self.num_tokens = document_tokens + most, document_tokens
        self._products: dict[int, _Product] = {}
        self._refused: set[int] = set()

    def of_documents(self) -> TorchFunctionMode:
        """Context manager that records the outputs of linear layers for the documents."""
        return _Record(self, slice(self.num_tokens))

    def of_step(self, count: int) -> TorchFunctionMode:
        """Context manager that records the outputs of linear layers for the `count` tokens of the next step."""
        self.num_tokens += count
        return _Record(self, slice(self.num_tokens - count, self.num_tokens))

    def replayed(self) -> TorchFunctionMode:
        """Context manager in which linear layers over all tokens return the recorded outputs, once each."""
        return _Replay(self)

    def keep(self, weight: Tensor, rows: slice, values: Tensor) -> None:
        """Keep the products (1, rows, O) of some rows."""
        if id(weight) in self._refused:
            return
        product = self._products.get(id(weight))
        if product is None:
            product = _Product(weight, values.new_empty(1, self.most_tokens, values.shape[2]), 0)
            self._products[id(weight)] = product
        product.values[:, rows] = values
        product.rows += values.shape[1]

    def refuse(self, weight: Tensor) -> None:
        """Discard the products of a weight and stop recording it."""
        self._products.pop(id(weight), None)
        self._refused.add(id(weight))

    def take(self, weight: Tensor) -> Tensor | None:
        """Remove and return all products (1, P, O) of a weight; None if they are incomplete."""
        product = self._products.pop(id(weight), None)
        if product is None or product.rows != self.num_tokens:
            return None
        values = product.values[:, : self.num_tokens]
        return values.new_empty(0).set_(values)  # the same memory, not as a view: adapters add to outputs in place


# With fewer input features, as in an adapter's second matrix, computing a product is faster than recording it.
_FEWEST_FEATURES = 32


def _is_of(tokens: int, func: Callable, args: tuple, kwargs: dict | None) -> bool:
    """Whether a call is a linear layer over `tokens` tokens, with arguments by position, as in modules of PyTorch."""
    return func is F.linear and not kwargs and args[0].shape[:-1] == (1, tokens)


class _Record(TorchFunctionMode):
    def __init__(self, recording: Recording, rows: slice):
        super().__init__()
        self.recording, self.rows = recording, rows
        self.count = rows.stop - (rows.start or 0)
        self._seen: set[int] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if _is_of(self.count, func, args, kwargs) and args[0].shape[-1] >= _FEWEST_FEATURES:
            weight = args[1]
            if id(weight) in self._seen:  # a layer that runs twice in a pass: its products cannot be told apart
                self.recording.refuse(weight)
            else:
                self._seen.add(id(weight))
                self.recording.keep(weight, self.rows, result)
        return result


class _Replay(TorchFunctionMode):
    def __init__(self, recording: Recording):
        super().__init__()
        self.recording = recording

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if _is_of(self.recording.num_tokens, func, args, kwargs):
            values = self.recording.take(args[1])
            if values is not None:
                output = Replayed.apply(*args[:2], args[2] if len(args) > 2 else None, (values,))
                output.__dict__["replayed"] = True
                return output
        return func(*args, **(kwargs or {}))


def is_replayed(output: Tensor) -> bool:
    """Whether a linear layer returned `output` from a recording, without multiplying."""
    return "replayed" in output.__dict__


class Replayed(torch.autograd.Function):
    """`linear(x, weight, bias)` of x (1, P, I) with known values (1, P, O): only the backward pass is computed."""

    @staticmethod
    def forward(ctx, x, weight, bias, known):
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype
        return known[0]  # in a tuple, since an output that is also an input would be a view of it

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        x_dtype, bias_dtype = ctx.dtypes
        grad = grad[0]
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = product(grad, weight.to(grad.dtype)).to(x_dtype)[None]
        if ctx.needs_input_grad[1]:
            grad_weight = product(grad.mT, x[0].to(grad.dtype)).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0, dtype=bias_dtype)
        return grad_x, grad_weight, grad_bias, None
