"""Float32 products of linear layers by oneDNN, where the library that PyTorch takes for them leaves AVX-512 unused.

PyTorch multiplies float32 matrices on CPU by MKL, whose kernels use AVX-512 on Intel's processors alone. oneDNN, which
is part of PyTorch too and multiplies bfloat16, uses it on any: on AMD EPYC (Zen 5) it takes half the time for float32.
The results are float32 products like MKL's, summed in another order.

    R  rows    I, O  features
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# Multiplications below which a product is left to PyTorch.
SMALLEST = 2**20


def fast_products() -> AbstractContextManager:
    """Inside the block, linear layers take the faster library, where this machine has one."""
    return _FastProducts() if _onednn_is_faster() else nullcontext()


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` of matrices, without a graph, by the faster library."""
    rows, columns = left.shape[0], right.shape[1]
    if _onednn_is_faster() and _suits(left, right, rows * columns * left.shape[1]):
        return _onednn(left, right.mT, None)
    return left @ right


class _FastProducts(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear and not kwargs:
            x, weight, bias = (*args, None)[:3]
            if _suits(x, weight, x.numel() * weight.shape[0]) and not torch.is_autocast_enabled("cpu"):
                if torch.is_grad_enabled():
                    return _Linear.apply(x, weight, bias)
                return _onednn(x, weight, bias)
        return func(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    """`linear` of x (..., I) by weight (O, I) and bias (O,), with a gradient."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_x = product(rows, weight).view_as(x) if ctx.needs_input_grad[0] else None
        grad_weight = product(rows.mT, x.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _suits(x: Tensor, other: Tensor, multiplications: int) -> bool:
    """Whether it is a product of plain float32 matrices on CPU that is worth it."""
    plain = all(type(t) in (Tensor, torch.nn.Parameter) and t.device.type == "cpu" for t in (x, other))
    return plain and x.dtype == other.dtype == torch.float32 and multiplications >= SMALLEST


@cache
def _onednn_is_faster() -> bool:
    """On processors with AVX-512 that are not Intel's."""
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        return "GenuineIntel" not in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
