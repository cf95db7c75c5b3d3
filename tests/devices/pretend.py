"""An accelerator that a CPU pretends to be, which finds mistakes of device and synchronisation without a GPU. Tensors
on `pretend:0` and `pretend:1` are PyTorch's own, made by DLPack from memory of the CPU, and one kernel, a `_Call`,
computes all operations on CPU tensors with their memory, so results are equal to the CPU's to the last digit. As with
CUDA, an operation on tensors of two devices is an error, and reading a value waits for the device. `record` counts
kernels and waits by line. Use it in a process of its own, for which the backend is registered."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ebft.tools.doctor import fake
from ebft.tools.doctor.fake import INDEXING, NAME, kernels_of
from tests.devices import counting
from tests.devices.counting import Counts, is_ours, line_of_package, record

__all__ = ["NAME", "Counts", "MixedDevices", "is_possible", "pretend_device", "record", "register"]
_torch: Any = torch  # for names that are not public
CPU = torch.device("cpu")
aten = torch.ops.aten
_CPU_KERNEL = _torch._C.DispatchKeySet(_torch._C.DispatchKey.CPU)
_EXTERNAL = 12  # the device type that DLPack reserves for others, kDLExtDev
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
# Operations whose kernels for the CPU read and write no data, so that they are those of the device.
_SHAPES_ONLY = ("as_strided", "view", "_reshape_alias", "unfold", "set_.source_Storage_storage_offset")
_SHAPES_ONLY += ("set_.source_Storage", "set_.source_Tensor", "set_")
# Operations that compute nothing on the device.
_FREE = {
    *("empty", "empty_strided", "as_strided", "view", "_unsafe_view", "_reshape_alias", "unfold", "set_", "resize_"),
    *("detach", "alias", "t", "transpose", "expand", "slice", "select", "unsqueeze", "squeeze", "permute", "split"),
    *("unbind", "view_as_real", "view_as_complex", "diagonal", "new_empty", "is_pinned", "is_same_size"),
    *("split_with_sizes", "empty_like", "lift_fresh"),
}
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


def is_possible() -> bool:
    """Whether this PyTorch has backends that are written in Python, and no real accelerator."""
    has_guard = hasattr(torch._C, "_acc") and hasattr(torch._C._acc, "register_python_privateuseone_device_guard")
    return has_guard and not torch.accelerator.is_available()


class Hooks(_torch._C._acc.PrivateUse1Hooks):
    is_on = False  # else the device does not exist
    is_available = lambda self: self.is_on
    has_primary_context = is_built = lambda self, *_: True


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


class Module(fake.Module):
    """What PyTorch expects as `torch.pretend`."""

    Stream = Event = _Stream
    is_available = is_initialized = staticmethod(lambda: Hooks.is_on)
    device_count = staticmethod(lambda: 2 if Hooks.is_on else 0)
    current_stream = staticmethod(lambda device=None: _Stream())
    stream = staticmethod(lambda stream: stream)


class Generator(fake.DeviceGenerator):
    of_device: weakref.WeakSet[Generator] = weakref.WeakSet()

    def __init__(self, device: Any = "cpu"):
        if torch.device(device).type == NAME:
            self.of_device.add(self)


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
def register() -> Any:
    """Register the backend, once in a process; what is returned must be kept."""
    fallback, library = fake.register_backend(Module, Hooks())
    fallback.fallback(_run, "PrivateUse1")
    library.impl("copy_", _copy, "PrivateUse1")
    for full in _SHAPES_ONLY:
        library.impl(full, partial(_overload(full).redispatch, _CPU_KERNEL), "PrivateUse1")
    for full in _torch._C._dispatch_get_all_op_names():
        if full.startswith("aten::_foreach_") or full == "aten::silu_backward":  # one kernel, not one for each tensor
            library.impl(full, partial(_run, _overload(full)), "PrivateUse1")
    for name, function in _ONE_KERNEL.items():
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            library.impl(name, partial(_OneKernel.call, function), key)
    return fallback, library


def _overload(full: str) -> Any:
    """The operation `aten::name.overload`."""
    name, _, overload = full.removeprefix("aten::").partition(".")
    return getattr(getattr(aten, name), overload or "default")


# Tensors of the device


def own(memory: Tensor, device: torch.device, like: Tensor) -> Tensor:
    """A tensor of the device with the shape of `like`, which owns the memory of a flat CPU tensor."""
    capsule = _torch.utils.dlpack.to_dlpack(memory)
    address = _pointer_of(capsule, b"dltensor")
    # struct DLTensor {void *data; int32_t device_type, device_id; ...}
    ctypes.c_int32.from_address(address + 8).value = _EXTERNAL
    ctypes.c_int32.from_address(address + 12).value = device.index
    return _shaped(_torch._C._from_dlpack(capsule), like)


def moved(found: Tensor, device: torch.device) -> Tensor:
    """A tensor of the device that owns the memory of `found`, which is on CPU."""
    return own(torch.empty(0, dtype=found.dtype).set_(found.untyped_storage()), device, found)


def _shaped(owner: Tensor, like: Tensor) -> Tensor:
    """A tensor with the shape of `like` in the memory of `owner`."""
    shape = like.shape, like.stride(), like.storage_offset()
    return aten.as_strided.default.redispatch(_CPU_KERNEL, owner, *shape)


def _set(given: Tensor, to: Tensor) -> None:
    """Let a tensor of the device have the memory and the shape of another."""
    shape = to.storage_offset(), to.shape, to.stride()
    aten.set_.source_Storage_storage_offset.redispatch(_CPU_KERNEL, given, to.untyped_storage(), *shape)


def on_cpu(given: Tensor) -> Tensor:
    """The data of a tensor as a CPU tensor, which is valid as long as `given` is."""
    if given.device.type == "cpu":
        return given
    storage = given.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty(0, dtype=given.dtype).as_strided(given.shape, given.stride())
    data = _torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, storage.nbytes())
    return torch.empty(0, dtype=given.dtype).set_(data, given.storage_offset(), given.shape, given.stride())


def shares_memory(tensor: Tensor, other: Tensor) -> bool:
    storage, others = tensor.untyped_storage(), other.untyped_storage()
    return storage.data_ptr() == others.data_ptr() if storage.data_ptr() else storage._cdata == others._cdata


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
        counting.current.waits[line_of_package(), "copy to cpu"] += 1
    elif source.device.type == "cpu":
        counting.current.uploads[line_of_package()] += 1
        if not (non_blocking and _is_copied_later(target, source)):
            counting.current.waits[line_of_package(), "copy to device"] += 1
    else:
        counting.current.kernels[line_of_package()] += 1
    on_cpu(target).copy_(on_cpu(source))
    return target


def _is_copied_later(target: Tensor, source: Tensor) -> bool:
    """Whether CUDA copies memory of the CPU without a wait if the caller asks for that. From pinned memory always; but
    a change of dtype, or a source that is not contiguous, is first written to other memory. From memory that is not
    pinned, the driver takes up to 64 KiB into its own and returns; for more it waits."""
    is_pinned = _is_pinned(source) and source.is_contiguous() and source.dtype == target.dtype
    return is_pinned or target.numel() * target.element_size() <= _STAGED


class _OneKernel(torch.autograd.Function):
    """A function that a GPU computes with one kernel, most devices with several; backward has one a gradient."""

    @staticmethod
    def call(function: Any, *args: Any, **kwargs: Any) -> Tensor:
        return _OneKernel.apply(function, kwargs, *args)

    @staticmethod
    def forward(ctx: Any, function: Any, kwargs: dict[str, Any], *args: Any) -> Tensor:
        device = {each.device for each in args if isinstance(each, Tensor)}
        if len(device) > 1:
            raise MixedDevices(f"{function.__name__} mixes devices: {device}. At {line_of_package()}")
        counting.current.kernels[line_of_package()] += 1
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
        counting.current.kernels["(backward)"] += len(wanted)
        grads = iter(torch.autograd.grad(found, wanted, on_cpu(grad)))
        return None, None, *(moved(next(grads), grad.device) if needs else None for needs in needed)


_ONE_KERNEL = {each.__name__: each for each in (torch.nn.functional.scaled_dot_product_attention, torch.rms_norm)}


@cache
def _takes(op: Any) -> tuple[str, frozenset[int]]:
    """The name of an operation, and the places of its arguments that are tensors."""
    tensors = [index for index, argument in enumerate(op._schema.arguments) if str(argument.type) == "Tensor"]
    return op._schema.name.rpartition("::")[2], frozenset(tensors)


def _numbers_as_tensors(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with tensors for numbers, which few operations accept in place of a tensor from Python."""
    tensors = _takes(op)[1]
    numbers = [index for index, each in enumerate(args) if type(each) in (int, float, bool) and index in tensors]
    first = next((each for each in args if isinstance(each, Tensor)), None) if numbers else None
    if first is None:
        return args
    shape, found = torch.empty(first.shape[:1], dtype=first.dtype), list(args)
    for index in numbers:
        found[index] = torch.tensor(args[index], dtype=torch.result_type(shape, args[index]))
    return tuple(found)


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The kernel of every operation."""
    return _Call(op, _numbers_as_tensors(op, args), kwargs).result()


class _Call:
    """One call of an operation: its tensors of the device, and their images, on which it is computed."""

    def __init__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.op, self.args, self.kwargs, self.name = op, args, kwargs, _takes(op)[0]
        self.given: list[Tensor] = []  # of the device
        self.others: list[Tensor] = []  # on CPU
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}  # of the device, and its image, by id
        self.device = torch.device(NAME, 0)
        self._collect(args)
        self._collect(kwargs.values())

    def result(self) -> Any:
        self._check()
        generator = self.kwargs.get("generator")
        if generator is not None and not _is_of_device(generator):
            raise MixedDevices(f"{self.op} expects a generator of the device, not of the CPU. At {line_of_package()}")
        found = self.op(*self.image(self.args), **self.image(self.kwargs))
        if self.name not in _FREE:
            _count(self.name, self.args, self.kwargs)
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
            raise MixedDevices(f"{self.op} mixes devices: {', '.join(shapes)}. At {line_of_package()}")

    def _collect(self, values: Any) -> None:
        for value in values:
            if isinstance(value, Tensor):
                if value.device.type == "cpu":
                    self.others.append(value)
                    continue
                if not self.given:
                    self.device = value.device
                self.given.append(value)
            elif isinstance(value, torch.device):
                if value.type == NAME:
                    self.device = torch.device(NAME, value.index or 0)
            elif isinstance(value, (list, tuple)):
                self._collect(value)

    def image(self, value: Any) -> Any:
        """An argument with images of the tensors in it."""
        if isinstance(value, Tensor):
            if value.device.type != "cpu" and id(value) not in self.pairs:
                self.pairs[id(value)] = (value, on_cpu(value))
            return value if value.device.type == "cpu" else self.pairs[id(value)][1]
        if isinstance(value, torch.device) and value.type == NAME:
            return CPU
        if isinstance(value, dict):
            return {key: self.image(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)([self.image(each) for each in value])
        return value

    def on_device(self, found: Any) -> Any:
        """What the operation returned for the images, as tensors of the device."""
        if isinstance(found, (list, tuple)):
            return type(found)([self.on_device(each) for each in found])
        if not isinstance(found, Tensor):
            return found
        for given, image in self.pairs.values():
            if found is image:
                if found.untyped_storage().nbytes() > given.untyped_storage().nbytes():  # resized
                    _set(given, moved(found, self.device))
                elif found.shape != given.shape or found.stride() != given.stride():
                    _set(given, _shaped(given, found))
                return given
        for given, image in self.pairs.values():
            if shares_memory(found, image):
                return _shaped(given, found)
        return moved(found, self.device)


def _count(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    line = line_of_package()
    counting.current.kernels[line] += kernels_of(name, args)
    waits = int(name in _WAITS and kwargs.get("output_size") is None)
    if name in INDEXING:
        indices = [each for each in args[1] if each is not None]
        if any(each.dtype in (torch.bool, torch.uint8) for each in indices):
            waits, name = int(name != "index"), "boolean index"  # reading calls nonzero, which is counted
        elif copied := sum(each.device.type == "cpu" for each in indices):
            if name == "index":  # its shape was computed from copies
                counting.current.waits[line, "copy to device"] -= copied
            waits, name = copied, "index on CPU" if is_ours() else "index on CPU, of another package"
    elif name == "where":  # which copies numbers that are tensors
        waits, name = sum(each.device.type == "cpu" for each in args[:3]), "copy to device"
    if waits:
        counting.current.waits[line, name] += waits
