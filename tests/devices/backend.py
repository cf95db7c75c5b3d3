"""A PyTorch backend that is written in Python, for devices that do not exist.

Its key is PrivateUse1. One kernel, a `Call`, computes all operations on CPU tensors with the memory of the given ones.
Tensors of the device are PyTorch's own, made by DLPack from memory of the CPU. pretend.py uses it to find mistakes.

The backend is registered for the whole process, before its first backward pass: use it in a process of its own.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_torch: Any = torch  # for names that are not public
NAME = "pretend"
DEVICES = 2
CPU = torch.device("cpu")
aten = torch.ops.aten
_CPU_KERNEL = _torch._C.DispatchKeySet(_torch._C.DispatchKey.CPU)
_AUTOCAST = _torch._C.DispatchKeySet(_torch._C.DispatchKey.AutocastPrivateUse1)
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
INDEXING = {"index", "index_put_", "index_put", "_index_put_impl_"}
# What CUDA's autocast computes in the lower precision, and in the widest of its inputs; in float32 all others that it
# registers (aten/src/ATen/autocast_mode.h).
_LOWER = {
    *("linear", "matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "addmv", "addr", "prelu", "chain_matmul"),
    *("einsum", "linalg_multi_dot", "linalg_vecdot", "scaled_dot_product_attention", "convolution", "_convolution"),
    *("conv1d", "conv2d", "conv3d", "_scaled_dot_product_flash_attention"),
}
_WIDEST = {
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot"),
    *("scatter_add",),
}
# Lists of tensors that fit into one kernel of a `_foreach_` function or a fused optimizer, by the number of lists.
_TENSORS_PER_KERNEL = (110, 64, 48, 36, 30)


class Hooks(_torch._C._acc.PrivateUse1Hooks):
    is_on = False  # else the device does not exist

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


class Module:
    """What PyTorch expects as `torch.pretend`. Random numbers are those of the CPU's generator."""

    _initialized = True
    Stream = Event = _Stream
    is_available = staticmethod(lambda: Hooks.is_on)
    is_initialized = staticmethod(lambda: Hooks.is_on)
    device_count = staticmethod(lambda: DEVICES if Hooks.is_on else 0)
    current_device = staticmethod(lambda: 0)
    _is_in_bad_fork = staticmethod(lambda: False)
    _lazy_init = staticmethod(lambda: None)
    manual_seed_all = staticmethod(lambda seed: None)
    set_device = staticmethod(lambda device: None)
    synchronize = staticmethod(lambda device=None: None)
    empty_cache = staticmethod(lambda: None)
    current_stream = staticmethod(lambda device=None: _Stream())
    stream = staticmethod(lambda stream: stream)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: torch.set_rng_state(state))
    get_device_properties = staticmethod(lambda device=None: SimpleNamespace(total_memory=2**36))

    @staticmethod
    @contextmanager
    def device(index: Any) -> Iterator[None]:
        yield


class Generator(torch.Generator):
    """A generator of the device is one of the CPU."""

    of_device: weakref.WeakSet[Generator] = weakref.WeakSet()

    def __new__(cls, device: Any = "cpu"):
        create: Any = super().__new__
        return create(cls, CPU if torch.device(device).type == NAME else device)

    def __init__(self, device: Any = "cpu"):
        if torch.device(device).type == NAME:
            self.of_device.add(self)


@cache
def register(call: type[Call], copy: Callable[..., Tensor]) -> Any:
    """Register the backend with the kernel of `call`, and that of `copy_`; return the library of its kernels.

    A process has one, as long as the libraries, which are kept here.
    """
    _torch.utils.backend_registration._setup_privateuseone_for_python_backend(NAME, Module, Hooks())
    fallback, library = _torch.library.Library("_", "IMPL"), _torch.library.Library("aten", "IMPL")
    fallback.fallback(partial(run, call), "PrivateUse1")
    fallback.fallback(_torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    library.impl("copy_", copy, "PrivateUse1")
    for full in _SHAPES_ONLY:
        library.impl(full, partial(_overload(full).redispatch, _CPU_KERNEL), "PrivateUse1")
    for full in _torch._C._dispatch_get_all_op_names():
        if full.startswith("aten::_foreach_") or full == "aten::silu_backward":  # one kernel, not one for each tensor
            library.impl(full, partial(run, call, _overload(full)), "PrivateUse1")
    for full in _torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
        op = _overload(full)
        if op is not None:
            library.impl(full, partial(_cast, op.overloadpacket.__name__, op), "AutocastPrivateUse1")
    _torch.clear_autocast_cache = _clear_casts
    _kept.append(fallback)
    return library


_kept: list[Any] = []


def _overload(full: str) -> Any:
    """The operation `aten::name.overload`; None if it cannot be called from Python."""
    name, _, overload = full.removeprefix("aten::").partition(".")
    return getattr(getattr(aten, name), overload or "default", None)


# Autocast


_casts: dict[int, tuple[Tensor, Tensor]] = {}  # of weights, in the lower precision, until autocast ends
_clear_autocast_cache = _torch.clear_autocast_cache


def _clear_casts() -> None:
    _casts.clear()
    _clear_autocast_cache()


def _cast(name: str, op: Any, *args: Any, **kwargs: Any) -> Any:
    """The operation with the dtypes that CUDA's autocast gives its arguments."""
    with _torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        to = torch.float32
        if name in _LOWER:
            to = torch.get_autocast_dtype(NAME)
        elif name in _WIDEST and not any(isinstance(each, Tensor) and each.dtype == to for each in args):
            to = None
        if to is not None and kwargs.get("dtype") is None:
            args, kwargs = _converted(args, to), {key: _converted(value, to) for key, value in kwargs.items()}
        return op(*args, **kwargs)


def _converted(value: Any, to: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_converted(each, to) for each in value])
    if not isinstance(value, Tensor) or not value.dtype.is_floating_point or value.dtype in (to, torch.float64):
        return value
    is_weight = value.is_leaf and value.requires_grad and value.dtype == torch.float32 != to
    if not (is_weight and _torch.is_autocast_cache_enabled()):
        return value.to(to)
    if id(value) not in _casts:
        with torch.enable_grad():
            _casts[id(value)] = (value, value.to(to))
    return _casts[id(value)][1]


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


# Operations


def run(call: type[Call], op: Any, *args: Any, **kwargs: Any) -> Any:
    """The kernel of every operation."""
    return call(op, _numbers_as_tensors(op, args), kwargs).result()


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


class Call:
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
        """The results, on the device."""
        raise NotImplementedError

    @property
    def kernels(self) -> int:
        """The kernels that CUDA starts."""
        if not self.name.startswith(("_foreach_", "_fused_adam")):
            return int(self.name not in _FREE)
        lists = [each for each in self.args if isinstance(each, (list, tuple)) and each and isinstance(each[0], Tensor)]
        return -(-len(lists[0]) // _TENSORS_PER_KERNEL[min(len(lists), len(_TENSORS_PER_KERNEL)) - 1])

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
