"""Float32 products of linear layers with oneDNN, on CPUs on which PyTorch's default library does not use AVX-512.

PyTorch multiplies float32 matrices on CPU with MKL, whose kernels use AVX-512 on Intel processors only. oneDNN, which
is also part of PyTorch and is its default for bfloat16, uses AVX-512 on all processors: on AMD EPYC (Zen 5), float32
products take half the time. The results are float32 products like MKL's, summed in a different order.

    R  rows    I, O  features
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# Minimum number of multiplications; smaller products use PyTorch's default.
SMALLEST = 2**20

# Functions of a weight (O, I) and a number of rows, called for products that no module computes, see `report`.
observers: list[Callable[[Tensor, int], None]] = []


def report(weight: Tensor, rows: int) -> None:
    """Call the observers for `rows` rows that were multiplied with a weight by no module, whose hooks would tell."""
    for observe in observers:
        observe(weight, rows)


def fast_products() -> AbstractContextManager:
    """Context manager in which linear layers use the faster library, if this machine has one."""
    return _FastProducts() if _onednn_is_faster() else nullcontext()


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` of matrices, without autograd, with the faster library."""
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
    """Differentiable `linear` of x (..., I) with weight (O, I) and bias (O,)."""

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
    """Whether this is a sufficiently large product of plain float32 matrices on CPU."""
    plain = all(type(t) in (Tensor, torch.nn.Parameter) and t.device.type == "cpu" for t in (x, other))
    return plain and x.dtype == other.dtype == torch.float32 and multiplications >= SMALLEST


@cache
def _onednn_is_faster() -> bool:
    """True on processors with AVX-512 that are not from Intel."""
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        return "GenuineIntel" not in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
