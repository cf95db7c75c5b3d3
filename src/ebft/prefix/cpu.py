"""What makes training on CPU cheaper with equal results: faster products, none computed twice, and memory kept.

PyTorch multiplies float32 matrices on CPU with MKL, whose kernels use AVX-512 on Intel processors only. oneDNN, which
is also part of PyTorch and is its default for bfloat16, uses AVX-512 on all processors: on AMD EPYC (Zen 5), float32
products take half the time. The results are float32 products like MKL's, summed in a different order.

`ActivationReuse` keeps the products of the sampling passes for the training forward pass, which then computes only
what needs a gradient. With a GPU, all of this leaves the computation to PyTorch, except that `single_pass: true` also
reuses activations there.

    R  rows    I, O  features    P  tokens of the training forward pass
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ebft.models.causal_lm import mark_reused

# Minimum number of multiplications; smaller products use PyTorch's default.
SMALLEST = 2**20


def cpu_matmul(device: torch.device) -> AbstractContextManager:
    """Context manager in which linear layers use the faster library, on CPUs that have one."""
    return _WithOneDNN() if device.type == "cpu" and _onednn_is_faster() else nullcontext()


def cpu_product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` of matrices, without autograd, with the faster library."""
    rows, columns = left.shape[0], right.shape[1]
    if _onednn_is_faster() and _suits(left, right, rows * columns * left.shape[1]):
        return torch.ops.mkldnn._linear_pointwise(left, right.mT, None, "none", [], "")
    return left @ right


class _WithOneDNN(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear and not kwargs:
            x, weight, bias = (*args, None)[:3]
            if _suits(x, weight, x.numel() * weight.shape[0]) and not torch.is_autocast_enabled("cpu"):
                with torch.no_grad():
                    known = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
                return KnownProduct.apply(x, weight, bias, (known,)) if torch.is_grad_enabled() else known
        return func(*args, **(kwargs or {}))


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


# With fewer input features, as in an adapter's second matrix, computing a product is faster than keeping it.
_FEWEST_FEATURES = 32


class ActivationReuse:
    """Products of linear layers by their weight, from the passes that sampled the rollouts of a layout.

    The training forward pass reads the documents' tokens, then the tokens of each step; `most` limits the latter.
    """

    def __init__(self, document_tokens: int, most: int):
        self.most_tokens, self.num_tokens = document_tokens + most, document_tokens
        # By the id of the weight, which is kept alive: the weight, its products (1, most_tokens, O), and their rows.
        self._products: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._refused: set[int] = set()

    def of_documents(self) -> TorchFunctionMode:
        """Context manager that keeps the outputs of linear layers for the documents."""
        return _Keep(self, slice(0, self.num_tokens))

    def of_step(self, count: int) -> TorchFunctionMode:
        """Context manager that keeps the outputs of linear layers for the `count` tokens of the next step."""
        self.num_tokens += count
        return _Keep(self, slice(self.num_tokens - count, self.num_tokens))

    def replayed(self) -> TorchFunctionMode:
        """Context manager in which linear layers over all tokens return what was kept, once each."""
        return _Reuse(self)

    def keep(self, weight: Tensor, rows: slice, values: Tensor) -> None:
        """Keep the products (1, rows, O) of some rows."""
        if id(weight) in self._refused:
            return
        if id(weight) not in self._products:
            self._products[id(weight)] = weight, values.new_empty(1, self.most_tokens, values.shape[2]), 0
        _, products, count = self._products[id(weight)]
        products[:, rows] = values
        self._products[id(weight)] = weight, products, count + values.shape[1]

    def refuse(self, weight: Tensor) -> None:
        """Discard the products of a weight and keep no further ones."""
        self._products.pop(id(weight), None)
        self._refused.add(id(weight))

    def take(self, weight: Tensor) -> Tensor | None:
        """Remove and return all products (1, P, O) of a weight; None if they are incomplete."""
        _, products, count = self._products.pop(id(weight), (None, None, 0))
        if products is None or count != self.num_tokens:
            return None
        values = products[:, : self.num_tokens]
        return values.new_empty(0).set_(values)  # the same memory, not as a view: adapters add to outputs in place


def _is_of(tokens: int, func: Callable, args: tuple, kwargs: dict | None) -> bool:
    """Whether a call is a linear layer over `tokens` tokens, with arguments by position, as in modules of PyTorch."""
    return func is F.linear and not kwargs and args[0].shape[:-1] == (1, tokens)


class _Keep(TorchFunctionMode):
    def __init__(self, reuse: ActivationReuse, rows: slice):
        super().__init__()
        self.reuse, self.rows, self.count = reuse, rows, rows.stop - rows.start
        self._seen: set[int] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if _is_of(self.count, func, args, kwargs) and args[0].shape[-1] >= _FEWEST_FEATURES:
            weight = args[1]
            if id(weight) in self._seen:  # a layer that runs twice in a pass: its products cannot be told apart
                self.reuse.refuse(weight)
            else:
                self._seen.add(id(weight))
                self.reuse.keep(weight, self.rows, result)
        return result


class _Reuse(TorchFunctionMode):
    def __init__(self, reuse: ActivationReuse):
        super().__init__()
        self.reuse = reuse

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if _is_of(self.reuse.num_tokens, func, args, kwargs):
            values = self.reuse.take(args[1])
            if values is not None:
                return mark_reused(KnownProduct.apply(*args[:2], args[2] if len(args) > 2 else None, (values,)))
        return func(*args, **(kwargs or {}))


class KnownProduct(torch.autograd.Function):
    """`linear(x, weight, bias)` of x (..., I) with known values (..., O): only the backward pass is computed."""

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
        rows, needs, shape = grad.flatten(0, -2), ctx.needs_input_grad, (*grad.shape[:-1], weight.shape[1])
        grad_x = cpu_product(rows, weight.to(rows.dtype)).to(x_dtype).view(shape) if needs[0] else None
        grad_weight = cpu_product(rows.mT, x.flatten(0, -2).to(rows.dtype)).to(weight.dtype) if needs[1] else None
        return grad_x, grad_weight, rows.sum(0, dtype=bias_dtype) if needs[2] else None, None


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h


def keep_freed_memory() -> None:
    """Let glibc reuse freed memory instead of returning it to the operating system, if training runs on CPU.

    A training step allocates and frees temporaries of tens of megabytes. By default glibc requests many blocks from
    the operating system each time, and every page is zeroed when it is first used. Memory that was used once then
    stays with the process, whose peak can be higher if the sizes change from step to step. Applies to the whole
    process. Environment variables MALLOC_MMAP_MAX_, MALLOC_TRIM_THRESHOLD_ or MALLOC_MMAP_THRESHOLD_ that are set take
    precedence; with other C libraries, or an accelerator, there is no effect.
    """
    chosen = any(f"MALLOC_{name}_" in os.environ for name in ("MMAP_MAX", "TRIM_THRESHOLD", "MMAP_THRESHOLD"))
    if chosen or platform.libc_ver()[0] != "glibc" or torch.accelerator.is_available():
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)  # no allocation in a mapping of its own
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # never shrink the heap
