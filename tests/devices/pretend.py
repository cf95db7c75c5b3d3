"""An accelerator that a CPU pretends to be, which finds mistakes of device and synchronisation without a GPU.

Tensors on `pretend:0` and `pretend:1` keep their data in memory of the CPU, and their kernels are those of the CPU, so
results are equal to the CPU's to the last digit. As with CUDA, an operation on tensors of two devices is an error, and
reading a value waits for the device. `record` counts kernels and waits by the line of `src/ebft` that they come from.

PyTorch's key for backends of others (PrivateUse1) gets a single kernel here, `_run`, for all operations that create
or compute tensors. Its tensors are PyTorch's own, made by DLPack from memory of the CPU, whose bytes they own.
"""

from __future__ import annotations

import ast
import ctypes
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import ebft
from ebft.tools.doctor.hollow import numbers_as_tensors

NAME = "pretend"
DEVICES = 2
_SOURCE = str(Path(ebft.__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_CPU = torch.device("cpu")
_CPU_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_EXTERNAL = 12  # the device type that DLPack reserves for others, kDLExtDev
_STAGED = 2**16  # bytes of memory that is not pinned which CUDA copies without a wait, if asked to
_aten = torch.ops.aten

# Operations that wait for the device: their result, or its shape, depends on values.
_WAITS = {
    *("_local_scalar_dense", "nonzero", "_unique", "_unique2", "unique_dim", "unique_consecutive", "masked_select"),
    *("unique_dim_consecutive", "equal", "is_nonzero", "repeat_interleave", "bincount", "histc", "item"),
    *("_linalg_check_errors", "_linalg_svd", "_linalg_eigh", "_assert_async", "allclose", "multinomial"),
}
# Operations that compute nothing on the device.
_FREE = {
    *("empty", "empty_strided", "as_strided", "view", "_unsafe_view", "_reshape_alias", "unfold", "set_", "resize_"),
    *("detach", "alias", "t", "transpose", "expand", "slice", "select", "unsqueeze", "squeeze", "permute", "split"),
    *("unbind", "view_as_real", "view_as_complex", "diagonal", "new_empty", "is_pinned", "is_same_size"),
}
# Operations in which CUDA allows a CPU tensor without dimensions, besides those that PyTorch tags as pointwise.
_ALLOW_SCALARS = {
    *("fill_", "masked_fill", "masked_fill_", "index_put_", "index_put", "_index_put_impl_", "copy_"),
    *("floor_divide", "floor_divide_"),
}
_INDEXING = {"index", "index_put_", "index_put", "_index_put_impl_"}


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


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    is_on = False  # for other tests of this process, the device does not exist

    def is_available(self) -> bool:
        return self.is_on

    def has_primary_context(self, index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class _Stream:
    """A stream or an event: everything is done at once."""

    def __new__(cls, *args: Any, **kwargs: Any):
        return super().__new__(cls)

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: Any) -> None: ...

    def record_event(self, event: Any = None) -> _Stream:
        return self

    def wait(self, stream: Any = None) -> None: ...

    wait_event = wait_stream = record = synchronize = wait


class _Module:
    """What PyTorch expects as `torch.pretend`."""

    _initialized = True
    Stream = Event = _Stream

    @staticmethod
    def is_available() -> bool:
        return _Hooks.is_on

    @staticmethod
    def device_count() -> int:
        return DEVICES if _Hooks.is_on else 0

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def is_initialized() -> bool:
        return _Hooks.is_on

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def _lazy_init() -> None: ...

    @staticmethod
    def manual_seed_all(seed: int) -> None: ...

    @staticmethod
    def set_device(device: Any) -> None: ...

    @staticmethod
    def synchronize(device: Any = None) -> None: ...

    @staticmethod
    def empty_cache() -> None: ...

    @staticmethod
    def current_stream(device: Any = None) -> _Stream:
        return _Stream()

    @staticmethod
    def stream(stream: Any) -> _Stream:
        return stream

    @staticmethod
    def get_device_properties(device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=2**36)

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    # Random numbers are those of the CPU's generator, so that they are the same on both.
    @staticmethod
    def get_rng_state(device: Any = None) -> Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    @staticmethod
    @contextmanager
    def device(index: Any) -> Iterator[None]:
        yield


@contextmanager
def pretend_device() -> Iterator[torch.device]:
    """Train on the pretend accelerator inside the block: PyTorch, accelerate and transformers find it."""
    from accelerate.state import AcceleratorState

    register()
    device = torch.device(NAME, 0)
    # Without gradients and without a device, which tests before this one may have left behind.
    AcceleratorState._reset_state(reset_partial_state=True)
    with ExitStack() as during:
        during.enter_context(patch.object(_Hooks, "is_on", True))
        during.enter_context(patch.dict(os.environ, ACCELERATE_TORCH_DEVICE=str(device)))
        during.enter_context(patch.object(torch, "Generator", _Generator))
        during.enter_context(patch("transformers.training_args.is_torch_bf16_gpu_available", lambda: True))
        during.enter_context(patch.object(Tensor, "pin_memory", _pin))
        during.enter_context(patch.object(Tensor, "is_pinned", _is_pinned))
        during.enter_context(patch.object(torch.UntypedStorage, "to", _storage_to))
        during.callback(AcceleratorState._reset_state, reset_partial_state=True)
        yield device


@cache
def register() -> tuple[torch.library.Library, ...]:
    """Register the backend, once in a process; the libraries live as long as the result."""
    hooks = _Hooks()
    torch.utils.backend_registration._setup_privateuseone_for_python_backend(NAME, _Module, hooks)
    fallback, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    fallback.fallback(_run, "PrivateUse1")
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten.impl("copy_", _copy, "PrivateUse1")
    _autocast_as_cuda(aten)
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.removeprefix("aten::").partition(".")
        if full.startswith("aten::_foreach_") or full == "aten::silu_backward":
            op = getattr(getattr(_aten, name), overload or "default")
            aten.impl(full, partial(_run, op), "PrivateUse1")
    for name, function in _ONE_KERNEL.items():
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            aten.impl(name, partial(_OneKernel.call, function), key)
    return fallback, aten


# Operations that CUDA's autocast computes in the lower precision, and those that take the widest of their inputs; all
# others that it registers are computed in float32.
_LOWER = {
    *("linear", "matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "addmv", "addr", "prelu", "chain_matmul"),
    *("einsum", "linalg_multi_dot", "linalg_vecdot", "scaled_dot_product_attention", "convolution", "_convolution"),
    *("conv1d", "conv2d", "conv3d"),
}
_WIDEST = {
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot"),
    *("scatter_add",),
}


def _autocast_as_cuda(aten: torch.library.Library) -> None:
    """Let autocast on the device change the dtypes of the operations for which it does so on CUDA."""
    own = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(name: str, op: Any, *args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(own):
            tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            dtypes = {each.dtype for each in tensors if each.is_floating_point() and each.dtype != torch.float64}
            if name in _WIDEST:
                to = torch.float32 if torch.float32 in dtypes else None
            else:
                to = torch.get_autocast_dtype(NAME) if name in _LOWER else torch.float32
            if to is not None and kwargs.get("dtype") is None:
                change = lambda each: each.to(to) if each.dtype in dtypes else each
                args, kwargs = pytree.tree_map_only(Tensor, change, (args, kwargs))
            return op(*args, **kwargs)

    for full in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
        name, _, overload = full.removeprefix("aten::").partition(".")
        packet = getattr(_aten, name)
        if (overload or "default") in packet.overloads():
            op = getattr(packet, overload or "default")
            aten.impl(full, partial(cast, name, op), "AutocastPrivateUse1")


class _Generator(torch.Generator):
    """A generator of the device is one of the CPU, which only operations on the device may use."""

    def __new__(cls, device: Any = "cpu"):
        return super().__new__(cls, _CPU if torch.device(device).type == NAME else device)

    def __init__(self, device: Any = "cpu"):
        if torch.device(device).type == NAME:
            _generators.add(self)


_generators: weakref.WeakSet[_Generator] = weakref.WeakSet()


def _is_of_device(generator: torch.Generator) -> bool:
    """By its state, since PyTorch makes another object for each call."""
    state = generator.get_state()
    return any(torch.equal(state, each.get_state()) for each in _generators)


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


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The kernel of every operation: check the devices, compute on CPU, and return the result on the device."""
    name = op._schema.name.rpartition("::")[2]
    if name == "set_":
        return op.redispatch(_CPU_KERNEL, *args)  # it changes no data
    call = _Call(op, name)
    on_cpu, options = call.on_cpu(numbers_as_tensors(op, args)), call.on_cpu(kwargs)
    call.check(args)
    if kwargs.get("generator") is not None and not _is_of_device(kwargs["generator"]):
        raise MixedDevices(f"{op} expects a generator of the device, not of the CPU. At {_line()}")
    found = op(*on_cpu, **options)
    _count(name, args, kwargs)
    return call.on_device(found)


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
    _view_on_cpu(target).copy_(_view_on_cpu(source))
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
        return _moved(function(*(_view_on_cpu(x) if isinstance(x, Tensor) else x for x in args), **kwargs), *device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        function, kwargs, given, random = ctx.rest
        needed, tensors = ctx.needs_input_grad[2:], iter(ctx.saved_tensors)
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(random)
            args = [
                _view_on_cpu(next(tensors)).detach().requires_grad_(needs) if each is None else each[0]
                for each, needs in zip(given, needed)
            ]
            found = function(*args, **kwargs)
        wanted = [each for each, needs in zip(args, needed) if needs]
        _counts.kernels["(backward)"] += len(wanted)
        grads = iter(torch.autograd.grad(found, wanted, _view_on_cpu(grad)))
        return None, None, *(_moved(next(grads), grad.device) if needs else None for needs in needed)


_ONE_KERNEL = {
    "scaled_dot_product_attention": torch.nn.functional.scaled_dot_product_attention,
    "rms_norm": torch.rms_norm,
}
# Lists of tensors that fit into one kernel of a `_foreach_` function or a fused optimizer, by the number of lists.
_TENSORS_PER_KERNEL = (110, 64, 48, 36, 30)


class _Call:
    """One call of an operation: its tensors on CPU, and which tensor of the device each of them is."""

    def __init__(self, op: Any, name: str):
        self.op, self.name, self.device = op, name, None
        self.tensors: list[tuple[Tensor, Tensor]] = []  # on its device, on CPU
        self.others: list[Tensor] = []  # the given tensors on CPU

    def on_cpu(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.device.type == "cpu":
                self.others.append(value)
                return value
            self.device = self.device or value.device
            found = _view_on_cpu(value)
            self.tensors.append((value, found))
            return found
        if isinstance(value, torch.device) and value.type == NAME:
            self.device = self.device or torch.device(NAME, value.index or 0)
            return _CPU
        if isinstance(value, dict):
            return {key: self.on_cpu(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.on_cpu(each) for each in value)
        return value

    def check(self, args: tuple[Any, ...]) -> None:
        """Raise MixedDevices where CUDA has an error."""
        others = self.others
        if self.name in _INDEXING:
            others = [each for each in others if not any(each is index for index in args[1])]
        scalars = torch.Tag.pointwise in self.op.tags or self.name in _ALLOW_SCALARS
        mixed = bool(self.tensors) and any(each.dim() > 0 or not scalars for each in others)
        if mixed or len({given.device for given, _ in self.tensors}) > 1:
            shapes = [f"{given.device} {tuple(given.shape)}" for given, _ in self.tensors]
            shapes += [f"cpu {tuple(each.shape)}" for each in self.others]
            raise MixedDevices(f"{self.op} mixes devices: {', '.join(shapes)}. At {_line()}")

    def on_device(self, found: Any) -> Any:
        if isinstance(found, Tensor):
            return self._tensor_on_device(found)
        if isinstance(found, (list, tuple)):
            return type(found)(self.on_device(each) for each in found)
        return found

    def _tensor_on_device(self, found: Tensor) -> Tensor:
        assert self.device is not None
        pointer = found.untyped_storage().data_ptr()
        for given, on_cpu in self.tensors:
            if found is on_cpu:
                if pointer != given.untyped_storage().data_ptr():  # resized
                    _set(given, _moved(found, self.device))
                elif found.shape != given.shape or found.stride() != given.stride():
                    _set(given, _as(found, given))
                return given
        for given, on_cpu in self.tensors:
            if pointer and pointer == on_cpu.untyped_storage().data_ptr():
                return _as(found, given)
        return _moved(found, self.device)


def _count(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if name in _FREE:
        return
    line = _line()
    _counts.kernels[line] += _launches(args) if name.startswith(("_foreach_", "_fused_adam")) else 1
    waits = int(name in _WAITS and kwargs.get("output_size") is None)
    if name in _INDEXING:
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


def _launches(args: tuple[Any, ...]) -> int:
    lists = [each for each in args if isinstance(each, (list, tuple)) and each and isinstance(each[0], Tensor)]
    return -(-len(lists[0]) // _TENSORS_PER_KERNEL[min(len(lists), len(_TENSORS_PER_KERNEL)) - 1])


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
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, __file__)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_SOURCE)


def _view_on_cpu(given: Tensor) -> Tensor:
    """The data of a tensor as a CPU tensor, valid as long as `given` is."""
    if given.device.type == "cpu":
        return given
    storage = given.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty(0, dtype=given.dtype).as_strided(given.shape, given.stride())
    on_cpu = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), _CPU, storage.nbytes())
    return torch.empty(0, dtype=given.dtype).set_(on_cpu, given.storage_offset(), given.shape, given.stride())


def _moved(found: Tensor, device: torch.device) -> Tensor:
    """A tensor of the device that owns the memory of `found`, which is on CPU."""
    whole = torch.empty(0, dtype=found.dtype).set_(found.untyped_storage())
    capsule = torch.utils.dlpack.to_dlpack(whole)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = pointer(capsule, b"dltensor")
    # struct DLTensor {void *data; int32_t device_type, device_id; ...}
    ctypes.c_int32.from_address(address + 8).value = _EXTERNAL
    ctypes.c_int32.from_address(address + 12).value = device.index
    return _as(found, torch._C._from_dlpack(capsule))


def _as(found: Tensor, owner: Tensor) -> Tensor:
    """A tensor with the shape of `found` in the memory of `owner`."""
    shape = found.shape, found.stride(), found.storage_offset()
    return _aten.as_strided.default.redispatch(_CPU_KERNEL, owner, *shape)


def _set(given: Tensor, to: Tensor) -> None:
    """Let a tensor of the device have the memory and the shape of another."""
    shape = to.storage_offset(), to.shape, to.stride()
    _aten.set_.source_Storage_storage_offset.redispatch(_CPU_KERNEL, given, to.untyped_storage(), *shape)
