"""An accelerator that a CPU pretends to be, which finds mistakes of device and synchronisation without a GPU.

Tensors on `pretend:0` and `pretend:1` keep their data in memory of the CPU, and their kernels are those of the CPU, so
results are equal to the CPU's to the last digit. As with CUDA, an operation on tensors of two devices is an error, and
reading a value waits for the device. `record` counts kernels and waits by the line of `src/ebft` that they come from.

It is a backend of backend.py, for the whole process, before its first backward pass.
"""

from __future__ import annotations

import ast
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import ebft
from tests.devices import backend
from tests.devices.backend import INDEXING, NAME, Generator, Hooks, moved, on_cpu

_SOURCE = str(Path(ebft.__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_STAGED = 2**16  # bytes of memory that is not pinned which CUDA copies without a wait, if asked to
# Operations that wait for the device: their result, or its shape, depends on values.
_WAITS = {
    *("_local_scalar_dense", "nonzero", "_unique", "_unique2", "unique_dim", "unique_consecutive", "masked_select"),
    *("unique_dim_consecutive", "equal", "is_nonzero", "repeat_interleave", "bincount", "histc", "item"),
    *("_linalg_check_errors", "_linalg_svd", "_linalg_eigh", "_assert_async", "allclose", "multinomial"),
}
# Operations in which CUDA allows a CPU tensor without dimensions, besides those that PyTorch tags as pointwise.
_ALLOW_SCALARS = {
    *("fill_", "masked_fill", "masked_fill_", "index_put_", "index_put", "_index_put_impl_", "copy_"),
    *("floor_divide", "floor_divide_"),
}


class MixedDevices(torch.AcceleratorError):
    """An operation on tensors of several devices."""


@dataclass
class Counts:
    """What the device did, by `file:line` of the package; `(backward)` for what autograd's own thread started.

    `uploads` are copies to the device; those that wait for it are also among `waits`.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)  # (line, operation)
    uploads: Counter[str] = field(default_factory=Counter)

    def copy(self) -> Counts:
        return Counts(*(counter.copy() for counter in (self.kernels, self.waits, self.uploads)))

    def add(self, other: Counts) -> None:
        self.kernels.update(other.kernels)
        self.waits.update(other.waits)
        self.uploads.update(other.uploads)

    def since(self, before: Counts) -> Counts:
        """What was counted after `before` was copied."""
        return Counts(self.kernels - before.kernels, self.waits - before.waits, self.uploads - before.uploads)

    def by_function(self) -> tuple[Counter[str], Counter[str]]:
        """The kernels and the waits by function instead of line, such as `rewards.py whiten`."""
        kernels, waits = Counter(), Counter()
        for line, count in self.kernels.items():
            kernels[_function(line)] += count
        for (line, operation), count in self.waits.items():
            waits[f"{_function(line)}: {operation}"] += count
        return kernels, waits

    def table(self, lines: int | None = None) -> str:
        """The totals, and the lines with the most waits, then kernels."""
        sums = f"{sum(self.kernels.values())} kernels, {sum(self.waits.values())} waits"
        found = [f"{sums}, {sum(self.uploads.values())} copies to the device"]
        for what, counter in (("waits", self.waits), ("copies", self.uploads), ("kernels", self.kernels)):
            for line, count in counter.most_common(lines):
                found.append(f"{count:7} {what:8} {line if isinstance(line, str) else '  '.join(line)}")
        return "\n".join(found)


@cache
def _functions(path: str) -> dict[int, str]:
    """The name of the innermost function of each line of a file of the package."""
    found = {}
    for node in ast.walk(ast.parse(Path(_SOURCE, path).read_text(encoding="utf-8"))):  # outer functions first
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found |= dict.fromkeys(range(node.lineno, node.end_lineno + 1), node.name)
    return found


def _function(line: str) -> str:
    path, _, number = line.partition(":")
    return f"{path} {_functions(path).get(int(number), '')}".strip() if number else line


_counts = Counts()


def is_possible() -> bool:
    """Whether this PyTorch has backends that are written in Python, and no real accelerator."""
    has_guard = hasattr(torch._C, "_acc") and hasattr(torch._C._acc, "register_python_privateuseone_device_guard")
    return has_guard and not torch.accelerator.is_available()


@contextmanager
def record() -> Iterator[Counts]:
    """Count what the device does inside the block."""
    global _counts
    before, _counts = _counts, Counts()
    try:
        yield _counts
    finally:
        _counts = before


@contextmanager
def pretend_device() -> Iterator[torch.device]:
    """Train on the pretend accelerator inside the block: PyTorch, accelerate and transformers find it."""
    from accelerate.state import AcceleratorState

    register()
    device = torch.device(NAME, 0)
    # Without gradients and without a device, which tests before this one may have left behind.
    AcceleratorState._reset_state(reset_partial_state=True)
    with ExitStack() as during:
        during.enter_context(patch.object(Hooks, "is_on", True))
        during.enter_context(patch.dict(os.environ, ACCELERATE_TORCH_DEVICE=str(device)))
        during.enter_context(patch.object(torch, "Generator", Generator))
        during.enter_context(patch("transformers.training_args.is_torch_bf16_gpu_available", lambda: True))
        during.enter_context(patch.object(Tensor, "pin_memory", _pin))
        during.enter_context(patch.object(Tensor, "is_pinned", _is_pinned))
        during.enter_context(patch.object(torch.UntypedStorage, "to", _storage_to))
        during.callback(AcceleratorState._reset_state, reset_partial_state=True)
        yield device


@cache
def register() -> None:
    """Register the backend, once in a process."""
    library = backend.register(_Call, _copy)
    for name, function in _ONE_KERNEL.items():
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            library.impl(name, partial(_OneKernel.call, function), key)


def _is_of_device(generator: torch.Generator) -> bool:
    """By its state, since PyTorch makes another object for each call."""
    state = generator.get_state()
    return any(torch.equal(state, each.get_state()) for each in Generator.of_device)


_to = torch.UntypedStorage.to


def _storage_to(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
    """As `torch.load` uses it."""
    if torch.device(device).type != NAME:
        return _to(self, device=device, non_blocking=non_blocking)
    return torch.empty(0, dtype=torch.uint8).set_(self).to(device).untyped_storage()


_pinned: set[StorageWeakRef] = set()  # whose addresses are not used again as long as they are here


def _pin(given: Tensor, device: Any = None) -> Tensor:
    if _is_pinned(given):
        return given
    found = given.clone()
    _pinned.difference_update([each for each in _pinned if each.expired()])
    _pinned.add(StorageWeakRef(found.untyped_storage()))
    return found


def _is_pinned(given: Tensor, device: Any = None) -> bool:
    return given.device.type == "cpu" and StorageWeakRef(given.untyped_storage()) in _pinned


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """The kernel of `copy_`, the only operation between devices."""
    if target.numel() == 0:
        return target
    if target.device.type == "cpu":
        _counts.waits[_line(), "copy to cpu"] += 1
    elif source.device.type == "cpu":
        _counts.uploads[_line()] += 1
        if not (non_blocking and _is_copied_later(target, source)):
            _counts.waits[_line(), "copy to device"] += 1
    else:
        _counts.kernels[_line()] += 1
    on_cpu(target).copy_(on_cpu(source))
    return target


def _is_copied_later(target: Tensor, source: Tensor) -> bool:
    """Whether CUDA copies memory of the CPU without a wait if the caller asks for that.

    From pinned memory always; but a change of dtype, or a source that is not contiguous, is first written to other
    memory. From memory that is not pinned, the driver takes up to 64 KiB into its own and returns; for more it waits.
    """
    is_pinned = _is_pinned(source) and source.is_contiguous() and source.dtype == target.dtype
    return is_pinned or target.numel() * target.element_size() <= _STAGED


class _OneKernel(torch.autograd.Function):
    """A function that PyTorch composes of others on most devices, but computes with one kernel on a GPU.

    In backward, a kernel for each gradient.
    """

    @staticmethod
    def call(function: Any, *args: Any, **kwargs: Any) -> Tensor:
        return _OneKernel.apply(function, kwargs, *args)

    @staticmethod
    def forward(ctx: Any, function: Any, kwargs: dict[str, Any], *args: Any) -> Tensor:
        device = {each.device for each in args if isinstance(each, Tensor)}
        if len(device) > 1:
            raise MixedDevices(f"{function.__name__} mixes devices: {device}. At {_line()}")
        _counts.kernels[_line()] += 1
        tensors = [each for each in args if isinstance(each, Tensor)]
        ctx.save_for_backward(*tensors)
        others = [None if isinstance(each, Tensor) else (each,) for each in args]
        ctx.rest = function, kwargs, others, torch.get_rng_state()
        return moved(function(*(on_cpu(x) if isinstance(x, Tensor) else x for x in args), **kwargs), *device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        function, kwargs, given, random = ctx.rest
        needed, tensors = ctx.needs_input_grad[2:], iter(ctx.saved_tensors)
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(random)
            args = [
                on_cpu(next(tensors)).detach().requires_grad_(needs) if each is None else each[0]
                for each, needs in zip(given, needed)
            ]
            found = function(*args, **kwargs)
        wanted = [each for each, needs in zip(args, needed) if needs]
        _counts.kernels["(backward)"] += len(wanted)
        grads = iter(torch.autograd.grad(found, wanted, on_cpu(grad)))
        return None, None, *(moved(next(grads), grad.device) if needs else None for needs in needed)


_ONE_KERNEL = {
    "scaled_dot_product_attention": torch.nn.functional.scaled_dot_product_attention,
    "rms_norm": torch.rms_norm,
}


class _Call(backend.Call):
    """Check the devices, and compute on the CPU."""

    def result(self) -> Any:
        self._check()
        generator = self.kwargs.get("generator")
        if generator is not None and not _is_of_device(generator):
            raise MixedDevices(f"{self.op} expects a generator of the device, not of the CPU. At {_line()}")
        found = self.op(*self.image(self.args), **self.image(self.kwargs))
        if self.kernels:
            _count(self.name, self.kernels, self.args, self.kwargs)
        return self.on_device(found)

    def _check(self) -> None:
        """Raise MixedDevices where CUDA has an error."""
        others = self.others
        if self.name in INDEXING:
            others = [each for each in others if not any(each is index for index in self.args[1])]
        scalars = torch.Tag.pointwise in self.op.tags or self.name in _ALLOW_SCALARS
        mixed = bool(self.given) and any(each.dim() > 0 or not scalars for each in others)
        if mixed or len({each.device for each in self.given}) > 1:
            shapes = [f"{each.device} {tuple(each.shape)}" for each in (*self.given, *self.others)]
            raise MixedDevices(f"{self.op} mixes devices: {', '.join(shapes)}. At {_line()}")


def _count(name: str, kernels: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    line = _line()
    _counts.kernels[line] += kernels
    waits = int(name in _WAITS and kwargs.get("output_size") is None)
    if name in INDEXING:
        indices = [each for each in args[1] if each is not None]
        if any(each.dtype in (torch.bool, torch.uint8) for each in indices):
            waits, name = int(name != "index"), "boolean index"  # reading calls nonzero, which is counted
        elif copied := sum(each.device.type == "cpu" for each in indices):
            if name == "index":  # its shape was computed from copies
                _counts.waits[line, "copy to device"] -= copied
            waits, name = copied, "index on CPU" if _is_ours() else "index on CPU, of another package"
    elif name == "where":  # which copies numbers that are tensors
        waits, name = sum(each.device.type == "cpu" for each in args[:3]), "copy to device"
    if waits:
        _counts.waits[line, name] += waits


def _line() -> str:
    """`file:line` of the innermost call in the package."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_SOURCE):
            return f"{path[len(_SOURCE) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return "(elsewhere)" if threading.current_thread() is threading.main_thread() else "(backward)"


def _is_ours() -> bool:
    """Whether the package itself called PyTorch, and not a package that it called."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, __file__, backend.__file__)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_SOURCE)
