"""A device whose floating-point tensors have a shape but no data, so that a training step of any size runs in seconds.

It is a backend of PyTorch written in Python, for the key PrivateUse1. Integers and booleans have their values, since
shapes and layouts depend on them; numbers of other types have none: read from Python they are 0, and integers that are
computed from them are drawn at random (tokens from probabilities). A `Ledger` counts, by phase of the step, the bytes
of the storages that live, and the kernels, the FLOPs of matrix products and the bytes that kernels read and write.

The backend is registered for the whole process, before its first backward pass: use it in a process of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from math import inf, prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

_torch: Any = torch  # for names that are not public
NAME = "hollow"
DEVICES = 2  # the one that trains, and all others together
_CPU, _META = torch.device("cpu"), torch.device("meta")
_CPU_KERNEL = _torch._C.DispatchKeySet(_torch._C.DispatchKey.CPU)
_aten = torch.ops.aten
_ROUND = 512  # bytes to which CUDA's caching allocator rounds
_KEPT = 2**7  # bytes of tensors that have values if what they are computed from has, such as counts
_NOWHERE = 1 << 60  # the first of the addresses that no memory has
_EXTERNAL = 12  # the device type that DLPack reserves for others, kDLExtDev
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
# Operations that compute nothing on the device.
_FREE = {
    *("empty", "empty_strided", "as_strided", "view", "_unsafe_view", "_reshape_alias", "unfold", "set_", "resize_"),
    *("detach", "alias", "t", "transpose", "expand", "slice", "select", "unsqueeze", "squeeze", "permute", "split"),
    *("unbind", "view_as_real", "view_as_complex", "diagonal", "new_empty", "is_pinned", "is_same_size"),
    *("split_with_sizes", "empty_like", "lift_fresh"),
}
# What autocast computes in its lower precision, and in float32 (aten/src/ATen/autocast_mode.h).
_LOWER = ("linear", "matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "conv1d", "conv2d", "mv", "prelu", "einsum")
_FLOAT32 = {
    "": ("exp", "log", "log1p", "expm1", "rsqrt", "reciprocal", "prod", "sum", "layer_norm", "nll_loss", "softplus"),
    "int": ("softmax", "log_softmax"),
    "dim_IntList": ("sum",),
    "Tensor_Scalar": ("pow",),
}
# Comparisons that are true of finite positive numbers; of x == x.
_TRUE = {("eq", None), ("ne", inf), ("gt", 0), ("lt", inf)}
# Operations whose integers are places along the last dimension.
_SELECT = {"argmax", "argmin", "multinomial", "searchsorted", "topk", "sort", "max", "min", "bucketize"}
_INDEXING = {"index", "index_put_", "index_put", "_index_put_impl_"}


@dataclass
class Phase:
    """Of one phase: its peak of bytes by device, and what it computed."""

    peaks: list[int] = field(default_factory=lambda: [0] * DEVICES)
    kernels: int = 0
    flops: int = 0  # of the first device
    moved: int = 0  # bytes that its kernels read and write
    flops_elsewhere: int = 0


class Ledger:
    """Live bytes of the devices, and the `phases` in the order of their first use; phases may be nested."""

    def __init__(self) -> None:
        self.held = [0] * DEVICES
        self.memory = 0  # bytes of a device, if what a step does depends on it
        self._active = ["before loading"]
        self.restart()

    def restart(self) -> None:
        """Forget all phases, and do not count what lives now."""
        self.base = list(self.held)
        self.phases: dict[str, Phase] = {}
        self._begin()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count no peaks and no computation inside the block."""
        now, self.now = self.now, Phase()
        try:
            yield
        finally:
            self.now = now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block, or each call of a decorated function, as a phase; peaks of repeated ones are their largest.

        An inner phase counts for itself only.
        """
        self._active.append(name)
        self._begin()
        try:
            yield
        finally:
            self._active.pop()
            self._begin()

    def _begin(self) -> None:
        self.now = self.phases.setdefault(self._active[-1], Phase())
        live = (held - base for held, base in zip(self.held, self.base))
        self.now.peaks = [max(pair) for pair in zip(self.now.peaks, live)]

    def add(self, size: int, device: int) -> None:
        """Count bytes that were allocated, or with a negative size released."""
        self.held[device] += size
        self.now.peaks[device] = max(self.now.peaks[device], self.held[device] - self.base[device])


ledger = Ledger()


class _Hooks(_torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class _Module:
    """What PyTorch expects as `torch.hollow`."""

    _initialized = True
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: DEVICES)
    current_device = staticmethod(lambda: 0)
    is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    _lazy_init = staticmethod(lambda: None)
    manual_seed_all = staticmethod(lambda seed: None)
    set_device = staticmethod(lambda device: None)
    synchronize = staticmethod(lambda device=None: None)
    empty_cache = staticmethod(lambda: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: torch.set_rng_state(state))
    get_device_properties = staticmethod(lambda device=None: SimpleNamespace(total_memory=ledger.memory))

    @staticmethod
    @contextmanager
    def device(index: Any) -> Iterator[None]:
        yield


class _Generator(torch.Generator):
    """A generator of the device is one of the CPU."""

    def __new__(cls, device: Any = "cpu"):
        create: Any = super().__new__
        return create(cls, _CPU if torch.device(device).type == NAME else device)


@cache
def register() -> tuple[torch.library.Library, ...]:
    """Register the backend, once in a process; the libraries live as long as the result."""
    _torch.utils.backend_registration._setup_privateuseone_for_python_backend(NAME, _Module, _Hooks())
    _torch.Generator = _Generator
    _torch.UntypedStorage.__deepcopy__ = _deepcopy
    Tensor.pin_memory = lambda self, device=None: self
    fallback, aten = _torch.library.Library("_", "IMPL"), _torch.library.Library("aten", "IMPL")
    fallback.fallback(_run, "PrivateUse1")
    aten.impl("copy_", _copy, "PrivateUse1")
    aten.impl("convolution_overrideable", _convolution, "PrivateUse1")
    aten.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        aten.impl("scaled_dot_product_attention", _attention, key)
    autocast = _torch.library.Library("_", "IMPL")
    autocast.fallback(_torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in _LOWER:
        aten.impl(name, _cast(getattr(_aten, name).default, None), "AutocastPrivateUse1")
    for overload, names in _FLOAT32.items():
        for name in names:
            op = getattr(getattr(_aten, name), overload or "default")
            aten.impl(f"{name}.{overload}" if overload else name, _cast(op, torch.float32), "AutocastPrivateUse1")
    _torch.clear_autocast_cache = _clear_casts
    return fallback, aten, autocast


_deepcopy_storage = _torch.UntypedStorage.__deepcopy__


def _deepcopy(storage: Any, memo: dict[Any, Any]) -> Any:
    if storage.device.type != NAME:
        return _deepcopy_storage(storage, memo)
    copied = memo.setdefault("torch", {})
    if storage._cdata not in copied:
        dtype = torch.float16 if storage.data_ptr() >= _NOWHERE else torch.uint8
        whole = torch.empty(0, dtype=dtype, device=storage.device).set_(storage)
        copied[storage._cdata] = whole.clone().untyped_storage()
    return copied[storage._cdata]


_casts: dict[int, tuple[Tensor, Tensor]] = {}  # of weights, in the lower precision, until autocast ends
_clear_autocast_cache = _torch.clear_autocast_cache


def _clear_casts() -> None:
    _casts.clear()
    _clear_autocast_cache()


def _cast(op: Any, dtype: torch.dtype | None) -> Any:
    """The operation with its floating-point arguments in `dtype`, or in the lower precision of autocast."""

    def to(value: Any, wanted: torch.dtype) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)([to(each, wanted) for each in value])
        if not isinstance(value, Tensor) or not value.dtype.is_floating_point or value.dtype in (wanted, torch.float64):
            return value
        is_weight = dtype is None and value.is_leaf and value.requires_grad and value.dtype == torch.float32
        if not (is_weight and _torch.is_autocast_cache_enabled()):
            return value.to(wanted)
        if id(value) not in _casts:
            with torch.enable_grad():
                _casts[id(value)] = (value, value.to(wanted))
        return _casts[id(value)][1]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        wanted = dtype or _torch.get_autocast_dtype(NAME)
        with _torch._C._ExcludeDispatchKeyGuard(_torch._C.DispatchKeySet(_torch._C.DispatchKey.AutocastPrivateUse1)):
            return op(*to(args, wanted), **{key: to(value, wanted) for key, value in kwargs.items()})

    return kernel


# Tensors of the device


class _Memory:
    """The memory of a storage: that of `data`, or an address without any. Its bytes are released with it."""

    __slots__ = ("__array_interface__", "_size", "_device", "_data")
    _next = _NOWHERE

    def __init__(self, nbytes: int, device: int, data: Tensor | None):
        self._size, self._device, self._data = -(-nbytes // _ROUND) * _ROUND, device, data
        address = _Memory._next if data is None else data.data_ptr()
        _Memory._next += self._size if data is None else 0
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        ledger.add(self._size, device)

    def __del__(self) -> None:
        ledger.add(-self._size, self._device)


def _storage(count: int, dtype: torch.dtype, device: torch.device, data: Tensor | None) -> Tensor:
    """A flat tensor of the device with a new storage, which has the memory of `data`, or none."""
    index = device.index or 0
    memory = np.asarray(_Memory(count * dtype.itemsize, index, data))
    capsule = _torch.utils.dlpack.to_dlpack(torch.from_numpy(memory).view(dtype))
    address = _pointer_of(capsule, b"dltensor")
    # struct DLTensor {void *data; int32_t device_type, device_id; ...}
    ctypes.c_int32.from_address(address + 8).value = _EXTERNAL
    ctypes.c_int32.from_address(address + 12).value = index
    return _torch._C._from_dlpack(capsule)


def _has_data(tensor: Tensor) -> bool:
    """Whether a tensor of the device has values, as integers and empty tensors do."""
    storage = tensor.untyped_storage()
    return tensor.device.type == "cpu" or storage.nbytes() == 0 or storage.data_ptr() < _NOWHERE


def _as(shape: Tensor, owner: Tensor) -> Tensor:
    """A tensor with the shape of `shape` in the memory of `owner`."""
    return _aten.as_strided.default.redispatch(_CPU_KERNEL, owner, shape.shape, shape.stride(), shape.storage_offset())


def _set(given: Tensor, to: Tensor) -> None:
    """Let a tensor of the device have the memory and the shape of another."""
    shape = to.storage_offset(), to.shape, to.stride()
    _aten.set_.source_Storage_storage_offset.redispatch(_CPU_KERNEL, given, to.untyped_storage(), *shape)


def _moved(found: Tensor, device: torch.device) -> Tensor:
    """A tensor of the device with the shape of `found`, which is on meta or on CPU, and its values if they are kept.

    Integers without values are zeros.
    """
    size = found.untyped_storage().nbytes()
    count, data = size // found.dtype.itemsize, None
    if count and (_is_integral(found.dtype) or found.device.type == "cpu" and size <= _KEPT):
        data = torch.zeros(count, dtype=found.dtype)
        if found.device.type == "cpu":
            data = torch.empty(0, dtype=found.dtype).set_(found.untyped_storage())
    return _as(found, _storage(count, found.dtype, device, data))


def _is_integral(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _on_cpu(given: Tensor) -> Tensor:
    """The data of a tensor with values, as a CPU tensor that is valid as long as `given` is."""
    if given.device.type == "cpu":
        return given
    storage = given.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty(0, dtype=given.dtype).as_strided(given.shape, given.stride())
    on_cpu = _torch._C._construct_storage_from_data_pointer(storage.data_ptr(), _CPU, storage.nbytes())
    return torch.empty(0, dtype=given.dtype).set_(on_cpu, given.storage_offset(), given.shape, given.stride())


# Operations


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The kernel of every operation: compute integers from integers on CPU, and the shapes of everything else."""
    name = op._schema.name.rpartition("::")[2]
    if name == "set_":
        return op.redispatch(_CPU_KERNEL, *args)
    if name == "_local_scalar_dense" and not _has_data(args[0]):
        return 0.0
    if name == "masked_select":
        return args[0].expand(args[1].shape)[args[1].expand(args[0].shape)]
    if name == "equal" and not all(map(_has_data, args)):
        return args[0].shape == args[1].shape
    if name in _INDEXING:
        args = (args[0], _without_masks(args[1]), *args[2:])
    return _Call(op, name).result(numbers_as_tensors(op, args), kwargs)


def numbers_as_tensors(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with tensors for numbers, which few operations accept in place of a tensor from Python."""
    if not any(type(each) in (int, float, bool) for each in args):
        return args
    first = next((each for each in args if isinstance(each, Tensor)), None)
    found = list(args)
    for index, (value, argument) in enumerate(zip(args, op._schema.arguments)):
        if type(value) in (int, float, bool) and str(argument.type) == "Tensor" and first is not None:
            shape = torch.empty(first.shape[:1], dtype=first.dtype)
            found[index] = torch.tensor(value, dtype=torch.result_type(shape, value))
    return tuple(found)


def _without_masks(indices: Any) -> list[Tensor | None]:
    """Indices with the places that boolean ones select instead of them, since shapes have to be known."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            found.append(index)
        else:
            found.extend(_moved(each, index.device) for each in _on_cpu(index).nonzero(as_tuple=True))
    return found


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """The kernel of `copy_`, the only operation between devices."""
    if target.numel() and _has_data(target):
        _on_cpu(target).copy_(_on_cpu(source)) if _has_data(source) else _on_cpu(target).zero_()
    ledger.now.kernels += 1
    ledger.now.moved += target.nbytes + source.nbytes
    return target


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Fused attention, as on a GPU: that of FlashAttention, or with a mask the memory-efficient one."""
    if attn_mask is None:
        return _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    bias = attn_mask.to(query.dtype) if attn_mask.dtype == torch.bool else attn_mask
    bias = bias.expand(*query.shape[:-1], key.shape[-2])
    needs = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs, dropout_p, is_causal, scale=scale
    )[0]


def _convolution(*args: Any) -> Tensor:
    return _Call(_aten.convolution.default, "convolution").result(args, {})


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, ...]:
    args = (grad, x, weight, [grad.shape[1]], *others)  # the size of the bias, if there is one
    return _Call(_aten.convolution_backward.default, "convolution_backward").result(args, {})


class _Call:
    """One call of an operation: its tensors of the device, and their images on CPU or meta."""

    def __init__(self, op: Any, name: str):
        self.op, self.name = op, name
        self.device = torch.device(NAME, 0)
        self.given: list[Tensor] = []  # of the device
        self.pairs: list[tuple[Tensor, Tensor]] = []  # of the device, and its image
        self.is_real = True
        self.other: Any = None  # the number with which a comparison compares
        alias = op._schema.returns[0].alias_info if op._schema.returns else None
        self.is_view = alias is not None and not alias.is_write

    def result(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._collect(chain(args, kwargs.values()))
        if not self.given:
            size = prod(args[0]) if args and isinstance(args[0], (list, tuple)) else 0
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            self.is_real = _is_integral(dtype) or size * dtype.itemsize <= _KEPT
        self.other = next((each for each in args if isinstance(each, (int, float))), None)
        images, options = self._image(args), self._image(kwargs)
        found = self.op(*images, **options)
        if self.is_real and self.name in ("empty", "empty_strided", "empty_like", "new_empty"):
            found.zero_()
        elif self.is_real and isinstance(found, Tensor) and not _is_integral(found.dtype) and not self.is_view:
            found.nan_to_num_(0.0, 0.0, 0.0)  # 0 / 0, of values that are not known
        if self.name not in _FREE:
            self._count(args, kwargs, found)
        return self._on_device(found)

    def _collect(self, values: Any) -> None:
        for value in values:
            if isinstance(value, Tensor):
                if value.device.type == NAME:
                    self.device = value.device if not self.given else self.device
                    self.given.append(value)
                    self.is_real &= _has_data(value)
            elif isinstance(value, torch.device) and value.type == NAME:
                self.device = torch.device(NAME, value.index or 0)
            elif isinstance(value, (list, tuple)):
                self._collect(value)

    def _image(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            for given, image in self.pairs:
                if given is value:
                    return image
            if self.is_real:
                image = _on_cpu(value)
            elif value.device.type != NAME:
                return value if value.dim() == 0 else value.to(_META)
            else:
                image = _on_meta(value, self.pairs)
            if value.device.type == NAME:
                self.pairs.append((value, image))
            return image
        if isinstance(value, torch.device) and value.type == NAME:
            return _CPU if self.is_real else _META
        if isinstance(value, torch.Generator):
            return value if self.is_real else None
        if isinstance(value, dict):
            return {key: self._image(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)([self._image(each) for each in value])
        return value

    def _count(self, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> None:
        now = ledger.now
        now.kernels += 1
        results = found if isinstance(found, (list, tuple)) else (found,)
        moved = sum(each.numel() * each.element_size() for each in self.given)
        moved += sum(
            each.numel() * each.element_size()
            for each in results
            if isinstance(each, Tensor) and not any(each is image for _, image in self.pairs)
        )
        formula = flop_registry.get(self.op.overloadpacket)
        flops = 0 if formula is None else formula(*args, **kwargs, out_val=found)
        if self.device.index:
            now.flops_elsewhere += flops
        else:
            now.flops += flops
            now.moved += moved

    def _on_device(self, found: Any) -> Any:
        if isinstance(found, Tensor):
            return self._tensor_on_device(found)
        if isinstance(found, (list, tuple)):
            return type(found)([self._on_device(each) for each in found])
        return found

    def _tensor_on_device(self, found: Tensor) -> Tensor:
        storage = found.untyped_storage()._cdata
        for given, image in self.pairs:
            if found is image:
                if found.untyped_storage().nbytes() > given.untyped_storage().nbytes():  # resized
                    _set(given, _moved(found, self.device))
                elif found.shape != given.shape or found.stride() != given.stride():
                    _set(given, _as(found, given))
                self._fill(given)
                return given
        for given, image in self.pairs:
            if storage == image.untyped_storage()._cdata or (
                self.is_real and found.numel() and found.data_ptr() and _shares(found, image)
            ):
                return _as(found, given)
        result = _moved(found, self.device)
        self._fill(result)
        return result

    def _fill(self, result: Tensor) -> None:
        """Fill integers that are computed from numbers without values."""
        if self.is_real or not result.numel() or not _has_data(result):
            return
        values = _on_cpu(result)
        if not _is_integral(result.dtype):
            values.zero_()
            return
        if self.name.endswith("_"):
            return
        if values.dtype == torch.bool:
            values.fill_((self.name, self.other) in _TRUE)
        elif self.name in _SELECT:
            values.random_(2, max(3, self.given[0].shape[-1] if self.given[0].dim() else 3))


def _on_meta(value: Tensor, known: Any) -> Tensor:
    """An image on meta; those of tensors that share memory share it, too."""
    storage = value.untyped_storage()
    for given, image in known:
        if storage.data_ptr() == given.untyped_storage().data_ptr() and storage.nbytes() and value.dtype == given.dtype:
            return torch.empty(0, dtype=value.dtype, device=_META).set_(
                image.untyped_storage(), value.storage_offset(), value.shape, value.stride()
            )
    whole = torch.empty(storage.nbytes() // value.dtype.itemsize, dtype=value.dtype, device=_META)
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())


def _shares(found: Tensor, image: Tensor) -> bool:
    pointer = image.untyped_storage().data_ptr()
    return pointer != 0 and found.untyped_storage().data_ptr() == pointer
