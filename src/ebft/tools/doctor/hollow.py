"""A device whose floating-point tensors have a shape but no data, so that a training step of any size runs in seconds.

It is a backend of backend.py. Integers and booleans have their values, since shapes and layouts depend on them; numbers
of other types have none: read from Python they are 0, and integers that are computed from them are drawn at random
(tokens from probabilities). A `Ledger` counts, by phase of the step, the bytes of the storages that live, and the
kernels, the FLOPs of matrix products and the bytes that kernels read and write.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf, prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ebft.prefix.attention.passes import takes_grouped_heads
from ebft.tools.doctor import backend
from ebft.tools.doctor.backend import CPU, DEVICES, INDEXING, NAME, aten, on_cpu, own, run, shares_memory

_torch: Any = torch  # for names that are not public
_META = torch.device("meta")
_ROUND = 512  # bytes to which CUDA's caching allocator rounds
_KEPT = 2**7  # bytes of tensors that have values if what they are computed from has, such as counts
_NOWHERE = 1 << 60  # the first of the addresses that no memory has
# Comparisons that are true of finite positive numbers; of x == x.
_TRUE = {("eq", None), ("ne", inf), ("gt", 0), ("lt", inf)}
# Operations whose integers are places along the last dimension.
_SELECT = {"argmax", "argmin", "multinomial", "searchsorted", "topk", "sort", "max", "min", "bucketize"}


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


@cache
def register() -> None:
    """Register the backend, once in a process, which it is for."""
    library = backend.register(_Call, _copy)
    backend.Hooks.is_on = True
    _torch.Generator = backend.Generator
    _torch.UntypedStorage.__deepcopy__ = _deepcopy
    Tensor.pin_memory = lambda self, device=None: self
    library.impl("convolution_overrideable", partial(run, _Call, aten.convolution.default), "PrivateUse1")
    library.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
    # A kernel, and another one in backward, as on a GPU.
    library.impl("_fused_rms_norm", partial(run, _Call, aten._fused_rms_norm.default), "PrivateUse1")
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("scaled_dot_product_attention", _attention, key)


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


def _has_data(tensor: Tensor) -> bool:
    """Whether a tensor has values, as integers and empty tensors do."""
    storage = tensor.untyped_storage()
    return tensor.device.type == "cpu" or storage.nbytes() == 0 or storage.data_ptr() < _NOWHERE


def _moved(found: Tensor, device: torch.device) -> Tensor:
    """A tensor of the device with the shape of `found`, which is on meta or on CPU, and its values if they are kept.

    Integers without values are zeros.
    """
    size, dtype, data = found.untyped_storage().nbytes(), found.dtype, None
    if size and (_is_integral(dtype) or found.device.type == "cpu" and size <= _KEPT):
        data = torch.zeros(size // dtype.itemsize, dtype=dtype)
        if found.device.type == "cpu":
            data = torch.empty(0, dtype=dtype).set_(found.untyped_storage())
    memory = np.asarray(_Memory(size // dtype.itemsize * dtype.itemsize, device.index, data))
    return own(torch.from_numpy(memory).view(dtype), device, found)


def _is_integral(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _on_meta(value: Tensor, known: Any) -> Tensor:
    """An image on meta; those of tensors that share memory share it, too."""
    storage = value.untyped_storage()
    whole = torch.empty(storage.nbytes() // value.dtype.itemsize, dtype=value.dtype, device=_META)
    for given, image in known:
        if storage.data_ptr() == given.untyped_storage().data_ptr() and storage.nbytes() and value.dtype == given.dtype:
            whole = torch.empty(0, dtype=value.dtype, device=_META).set_(image.untyped_storage())
            break
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())


# Operations


def _without_masks(indices: Any) -> list[Tensor | None]:
    """Indices with the places that boolean ones select instead of them, since shapes have to be known."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            found.append(index)
        else:
            found.extend(_moved(each, index.device) for each in on_cpu(index).nonzero(as_tuple=True))
    return found


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """The kernel of `copy_`, the only operation between devices."""
    if target.numel() and _has_data(target):
        on_cpu(target).copy_(on_cpu(source)) if _has_data(source) else on_cpu(target).zero_()
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
    """Attention as on a GPU: FlashAttention, the memory-efficient kernel, or one that keeps the scores."""
    if attn_mask is None and takes_grouped_heads(query, key, value, dropout_p):
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True
        )[0]
    bias = None if attn_mask is None else attn_mask.to(query.dtype) if attn_mask.dtype == torch.bool else attn_mask
    bias = None if bias is None else bias.expand(*query.shape[:-1], key.shape[-2])
    needs = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs, dropout_p, is_causal, scale=scale
    )[0]


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, ...]:
    args = (grad, x, weight, [grad.shape[1]], *others)  # the size of the bias, if there is one
    return run(_Call, aten.convolution_backward.default, *args)


@dataclass(frozen=True)
class _Outcome:
    """What a call without values costs and returns: new tensors on meta, or the number of a given tensor."""

    flops: int
    moved: int
    found: Any


_outcomes: dict[Any, _Outcome] = {}  # by operation and the shapes of its arguments


class _Call(backend.Call):
    """Compute integers from integers on CPU, and the shapes of everything else on meta, once for each shape."""

    def __init__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        if op.overloadpacket.__name__ in INDEXING:
            args = (args[0], _without_masks(args[1]), *args[2:])
        super().__init__(op, args, kwargs)
        self.is_real, self._is_repeatable = all(map(_has_data, self.given)), True
        if not self.given:
            size = prod(args[0]) if args and isinstance(args[0], (list, tuple)) else 0
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            self.is_real = _is_integral(dtype) or size * dtype.itemsize <= _KEPT

    def result(self) -> Any:
        args = self.args
        if self.name == "masked_select":
            return args[0].expand(args[1].shape)[args[1].expand(args[0].shape)]
        if not self.is_real and self.name == "_local_scalar_dense":
            return 0.0
        if not self.is_real and self.name == "equal":
            return args[0].shape == args[1].shape
        key = None
        if self.given and not self.is_real:
            key = self.op, _shapes(args), _shapes(tuple(self.kwargs.items()))
        outcome = _outcomes.get(key)
        if outcome is not None:
            self._count(outcome.flops, outcome.moved)
            return self._again(outcome.found)
        found = self._computed()
        outcome = _Outcome(self._flops(found), self._bytes(found), self._kept(found))
        self._count(outcome.flops, outcome.moved)
        if key is not None and self._is_repeatable:
            _outcomes[key] = outcome
        return self.on_device(found)

    def _computed(self) -> Any:
        """What the operation returns for the images."""
        device = CPU if self.is_real else _META
        found = self.op(*self.image(self.args, device), **self.image(self.kwargs, device))
        if self.is_real and self.name in ("empty", "empty_strided", "empty_like", "new_empty"):
            found.zero_()
        elif self.is_real and isinstance(found, Tensor) and not _is_integral(found.dtype):
            found.nan_to_num_(0.0, 0.0, 0.0)  # 0 / 0, of values that are not known
        return found

    def _kept(self, found: Any) -> Any:
        """The results as an outcome has them, if a later call may have the same: views and resized tensors may not."""
        if isinstance(found, (list, tuple)):
            return type(found)([self._kept(each) for each in found])
        if found is None:
            return None
        number = self._number(found) if isinstance(found, Tensor) else None
        if number is not None:
            given = self.given[number]
            self._is_repeatable &= found.shape == given.shape and found.stride() == given.stride()
            return number
        shared = isinstance(found, Tensor) and any(shares_memory(found, image) for _, image in self.pairs.values())
        self._is_repeatable &= isinstance(found, Tensor) and not shared
        return found

    def _again(self, found: Any) -> Any:
        """The results of an outcome, on the device."""
        if isinstance(found, (list, tuple)):
            return type(found)([self._again(each) for each in found])
        if isinstance(found, int):
            return self.finish(self.given[found])
        return found if found is None else self.finish(self.moved(found))

    def _flops(self, found: Any) -> int:
        formula = flop_registry.get(self.op.overloadpacket)
        return 0 if formula is None else formula(*self.args, **self.kwargs, out_val=found)

    def _bytes(self, found: Any) -> int:
        """The bytes that the kernel reads and writes."""
        results = found if isinstance(found, (list, tuple)) else (found,)
        new = [each for each in results if isinstance(each, Tensor) and self._number(each) is None]
        return sum(each.numel() * each.element_size() for each in (*self.given, *new))

    def _number(self, found: Tensor) -> int | None:
        """Which of the given tensors has this image."""
        return next((n for n, each in enumerate(self.given) if self.pairs[id(each)][1] is found), None)

    def _count(self, flops: int, moved: int) -> None:
        now = ledger.now
        if self.kernels == 0:
            return
        now.kernels += self.kernels
        if self.device.index:
            now.flops_elsewhere += flops
        else:
            now.flops += flops
            now.moved += moved

    def image_of(self, value: Tensor) -> Tensor:
        if self.is_real:
            return on_cpu(value)
        if value.device.type == "cpu":
            return value if value.dim() == 0 else value.to(_META)
        return _on_meta(value, self.pairs.values())

    def moved(self, found: Tensor) -> Tensor:
        return _moved(found, self.device)

    def finish(self, result: Tensor) -> Tensor:
        """Fill integers that are computed from numbers without values."""
        if self.is_real or not result.numel() or not _has_data(result):
            return result
        values = on_cpu(result)
        if not _is_integral(result.dtype):
            values.zero_()
        elif self.name.endswith("_"):
            pass
        elif values.dtype == torch.bool:
            other = next((each for each in self.args if isinstance(each, (int, float))), None)
            values.fill_((self.name, other) in _TRUE)
        elif self.name in _SELECT:
            values.random_(2, max(3, self.given[0].shape[-1] if self.given[0].dim() else 3))
        return result


def _shapes(value: Any) -> Any:
    """What the outcome of a call depends on; numbers with their type, since 1 == True."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type
    if isinstance(value, (list, tuple)):
        return tuple([_shapes(each) for each in value])
    if isinstance(value, (int, float)):
        return type(value), value
    return None if isinstance(value, (torch.device, torch.Generator)) else value
