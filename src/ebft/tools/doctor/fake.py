"""A device whose floating-point tensors have a shape but no data, so that a training step of any size runs in seconds.

Its tensors come from PyTorch's FakeTensorMode, on a backend without kernels. Integers have their values in `known`,
since shapes and layouts depend on values. Other numbers have none: read from Python they are 0, and integers that are
computed from them are drawn at random (tokens from probabilities). A `Ledger` counts, by phase of the step, the bytes
of the storages that live, the kernels, the FLOPs of matrix products and the bytes that kernels read and write. The
backend is registered for the whole process: use it in a process of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from math import inf, prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry
from transformers import training_args

from ebft.models.causal_lm import PLAIN
from ebft.tools.doctor.known import Use

_torch: Any = torch  # for names that are not public
NAME = "pretend"
_CPU = torch.device("cpu")
aten = torch.ops.aten
_ROUND = 512  # bytes to which CUDA's caching allocator rounds
_KEPT = 2**7  # bytes of tensors that have values if what they are computed from has, such as counts
# Operations that start no kernel, besides views.
_FREE = ("empty", "new_empty", "_unsafe_view", "_reshape_alias", "set_", "resize_", "lift_fresh", "is_pinned")
INDEXING = {"index", "index_put_", "index_put", "_index_put_impl_"}
_SHAPES = {"set_", "resize_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_", "detach_"}  # not values
# Comparisons that are true of finite positive numbers; of x == x.
_TRUE = {("eq", None), ("ne", inf), ("gt", 0), ("lt", inf)}
# Operations whose integers are places along the last dimension.
_SELECT = {"argmax", "argmin", "multinomial", "searchsorted", "topk", "sort", "max", "min", "bucketize"}
# What CUDA's autocast computes in the lower precision, and in the widest of its inputs; what else it casts, in float32
# (ATen/autocast_mode.h).
_LOWER = {
    *("linear", "matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "addmv", "addr", "einsum", "convolution"),
    *("scaled_dot_product_attention", "conv1d", "conv2d", "conv3d", "_convolution", "linalg_vecdot", "prelu"),
    *("_scaled_dot_product_flash_attention", "chain_matmul", "linalg_multi_dot"),
}
_WIDEST = {
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot"),
    "scatter_add",
}
# Lists of tensors that fit into one kernel of a `_foreach_` function or a fused optimizer, by the number of lists.
_TENSORS_PER_KERNEL = (110, 64, 48, 36, 30)


class Ledger:
    """Live bytes of the devices, and the `phases` in the order of their first use; phases may be nested."""

    def __init__(self) -> None:
        self.held, self._active = [0, 0], ["before loading"]
        self.restart()

    def restart(self) -> None:
        """Forget all phases, and do not count what lives now."""
        self.base, self.phases = list(self.held), {}
        self._begin()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count no peaks and no computation inside the block."""
        now, self.now = self.now, Use()
        try:
            yield
        finally:
            self.now = now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block, or each call of a decorated function, as a phase; an inner one counts for itself only."""
        self._active.append(name)
        self._begin()
        try:
            yield
        finally:
            self._active.pop()
            self._begin()

    def _begin(self) -> None:
        self.now = self.phases.setdefault(self._active[-1], Use())
        self.add(0, 0)

    def add(self, size: int, device: int) -> None:
        """Count bytes that were allocated, or with a negative size released."""
        self.held[device] += size
        peak, elsewhere = (held - base for held, base in zip(self.held, self.base))
        self.now.peak, self.now.elsewhere = max(self.now.peak, peak), max(self.now.elsewhere, elsewhere)


ledger = Ledger()


class _Hooks(_torch._C._acc.PrivateUse1Hooks):
    is_available = has_primary_context = is_built = lambda self, *_: True


class Module:
    """What PyTorch expects as `torch.pretend`. Random numbers are drawn by the CPU's generator."""

    _initialized = True
    memory = 2**36  # bytes of a device
    is_available = is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 2)
    current_device = staticmethod(lambda: 0)
    _is_in_bad_fork = staticmethod(lambda: False)
    set_device = synchronize = empty_cache = manual_seed_all = _lazy_init = staticmethod(lambda *_: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: torch.set_rng_state(state))
    get_device_properties = staticmethod(lambda device=None: SimpleNamespace(total_memory=Module.memory))

    @staticmethod
    @contextmanager
    def device(index: Any) -> Iterator[None]:
        yield


class DeviceGenerator(torch.Generator):
    """A generator of the device is one of the CPU."""

    def __new__(cls, device: Any = "cpu"):
        create: Any = super().__new__
        return create(cls, _CPU if torch.device(device).type == NAME else device)


def register_backend(module: type[Module], hooks: _Hooks) -> tuple[Any, Any]:
    """Register a device with CUDA's autocast; return the libraries of its fallback and of its kernels, to be kept."""
    _torch.utils.backend_registration._setup_privateuseone_for_python_backend(NAME, module, hooks)
    fallback, library = _torch.library.Library("_", "IMPL"), _torch.library.Library("aten", "IMPL")
    clear = _torch.clear_autocast_cache
    _torch.clear_autocast_cache = lambda: (_casts.clear(), clear())
    fallback.fallback(_torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for full in _torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
        name, _, overload = full.removeprefix("aten::").partition(".")
        op = getattr(getattr(aten, name), overload or "default", None)
        if op is not None:
            library.impl(full, partial(_cast, name, op), "AutocastPrivateUse1")
    return fallback, library


@cache
def register() -> Any:
    """Register the backend and count what it does from here on, in a process for it; what is returned must be kept."""
    fallback, library = register_backend(Module, _Hooks())
    library.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    library.impl("scaled_dot_product_attention", _attention, "PrivateUse1")
    for name in ("silu_backward", "_fused_rms_norm"):  # one kernel, not those that they consist of elsewhere
        library.impl(name, getattr(aten, name).default, "PrivateUse1")
    _torch.Generator = DeviceGenerator

    def swap(given: Any, other: Any) -> None:  # PyTorch's own refuses tensors with weak references
        given.data = other  # of a parameter whose module is moved
        given.fake_device = other.fake_device

    _torch.utils.swap_tensors = swap
    FakeTensorMode.__deepcopy__ = lambda self, memo: self  # of copied tensors
    PLAIN.add(FakeTensor)
    for module in (optimizer, _foreach_utils):
        module._foreach_supported_types.append(FakeTensor)
    Tensor.pin_memory = lambda self, device=None: self
    training_args.is_torch_bf16_gpu_available = lambda: True  # which asks for CUDA by name
    _torch._C._set_only_lift_cpu_tensors(True)
    Counting().__enter__()
    return fallback, library


_casts: dict[int, tuple[Tensor, Tensor]] = {}  # of weights, in the lower precision, until autocast ends


def _cast(name: str, op: Any, *args: Any, **kwargs: Any) -> Any:
    """The operation with the dtypes that CUDA's autocast gives its arguments."""
    with _torch._C._ExcludeDispatchKeyGuard(_torch._C.DispatchKeySet(_torch._C.DispatchKey.AutocastPrivateUse1)):
        is_wide = name not in _WIDEST or any(isinstance(each, Tensor) and each.dtype == torch.float32 for each in args)
        if kwargs.get("dtype") is None and is_wide:
            to = partial(_converted, torch.get_autocast_dtype(NAME) if name in _LOWER else torch.float32)
            args, kwargs = _mapped(to, args), _mapped(to, kwargs)
        return op(*args, **kwargs)


def _converted(to: torch.dtype, value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.dtype.is_floating_point or value.dtype in (to, torch.float64):
        return value
    is_weight = value.is_leaf and value.requires_grad and value.dtype == torch.float32
    if not (is_weight and _torch.is_autocast_cache_enabled()):
        return value.to(to)
    if id(value) not in _casts:
        with torch.enable_grad():
            _casts[id(value)] = (value, value.to(to))
    return _casts[id(value)][1]


def _attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
               is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """Attention as on a GPU: FlashAttention, the memory-efficient kernel, or one that keeps the scores."""
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    if attn_mask is None and is_half and query.shape[-1] == value.shape[-1] <= 256:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True
        )[0]
    bias = None if attn_mask is None else attn_mask.to(query.dtype) if attn_mask.dtype == torch.bool else attn_mask
    bias = None if bias is None else bias.expand(*query.shape[:-1], key.shape[-2])
    given = query, key, value, bias
    needs = torch.is_grad_enabled() and any(each.requires_grad for each in given[:3])
    return aten._scaled_dot_product_efficient_attention(*given, needs, dropout_p, is_causal, scale=scale)[0]


def _is_integral(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _values(given: Tensor) -> Tensor | None:
    """The values of a tensor on CPU, or beside one of the device; None if it has none."""
    return getattr(given, "known", None) if isinstance(given, FakeTensor) else given


_live: dict[int, Any] = {}  # by storage, a weak reference whose end counts


def _mapped(function: Any, value: Any) -> Any:
    """`value` with `function` of everything that is in its lists, tuples and dicts."""
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(function, each) for each in value])
    if isinstance(value, dict):
        return {key: _mapped(function, each) for key, each in value.items()}
    return function(value)


def _on_device(device: torch.device, found: Any) -> Any:
    """A tensor of the device for one on meta, with the bytes of its storage in the ledger as long as it lives."""
    if not isinstance(found, Tensor) or isinstance(found, FakeTensor):
        return found
    storage = found.untyped_storage()
    key = storage._cdata
    if key not in _live:
        size = -(-storage.nbytes() // _ROUND) * _ROUND
        ledger.add(size, device.index)
        _live[key] = weakref.ref(storage, lambda _: (_live.pop(key), ledger.add(-size, device.index)))
    return FakeTensor(Counting.fakes, found, device)


class Counting(TorchDispatchMode):
    """Compute what is on CPU, and integers of the device from integers; of everything else the shapes alone."""

    fakes = FakeTensorMode()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.prim.device.default:
            return args[0].fake_device
        kwargs, name = kwargs or {}, op.overloadpacket.__name__
        tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        given = [each for each in tensors if isinstance(each, FakeTensor)]
        device = args[0].device if name == "copy_" else kwargs.get("device") or (given[0].device if given else _CPU)
        if device.type == NAME:
            device = torch.device(NAME, device.index or 0)
        elif not given:
            return op(*args, **kwargs)
        if name == "masked_select":
            name, op, args = "index", aten.index.Tensor, (args[0].expand(args[1].shape), [args[1]])
        if name in INDEXING:  # places that booleans select, since shapes have to be known
            with self:
                is_mask = [each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]]
                parts = [each.nonzero(as_tuple=True) if mask else [each] for each, mask in zip(args[1], is_mask)]
            args = args[0], [each for part in parts for each in part], *args[2:]
        if name in ("cat", "stack"):  # known parts stay so, as tokens beside their log-probabilities
            for each in given:
                if _values(each) is None and each.nbytes <= _KEPT:
                    each.known = torch.zeros(each.shape, dtype=each.dtype)
        is_known = all(_values(each) is not None for each in tensors)
        if not tensors:
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            size = prod(args[0]) if args and isinstance(args[0], (list, tuple)) else 0
            is_known = _is_integral(dtype) or size * dtype.itemsize <= _KEPT
        found = (self._known if is_known else self._unknown)(name, op, args, kwargs, device)
        if not (op.is_view or name.startswith(_FREE)):
            _count(name, op, args, kwargs, found, given, device)
        return found

    def _known(self, name: str, op: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        """The results of an operation on known values, on the device with their values."""
        pairs: list[tuple[Any, Tensor]] = []

        def real(value: Any) -> Any:
            if isinstance(value, FakeTensor):
                pairs.append((value, value.known))
                return value.known
            return _CPU if isinstance(value, torch.device) and value.type == NAME else value

        def placed(found: Any) -> Any:
            if not isinstance(found, Tensor) or device.type != NAME:
                return found
            shape, address = (found.shape, found.stride()), found.untyped_storage().data_ptr()
            for value, image in pairs:
                if found is image and found.shape == value.shape:
                    return value
                if address and address == image.untyped_storage().data_ptr() and found.dtype == image.dtype:
                    result = self._made(device, aten.as_strided.default, (value, *shape, found.storage_offset()), {})
                    break
            else:
                if not _is_integral(found.dtype):
                    found = found.nan_to_num(0.0, 0.0, 0.0)  # 0 / 0, of values that are not known
                result = self._made(device, torch.empty_strided, shape, {"dtype": found.dtype, "device": "meta"})
            if _is_integral(found.dtype) or found.nbytes <= _KEPT:
                result.known = found
            return result

        found = op(*_mapped(real, args), **_mapped(real, kwargs))
        return _mapped(placed, found.zero_() if name.startswith(("empty", "new_empty")) else found)

    def _unknown(self, name: str, op: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        """The results of an operation on numbers without values."""
        if name == "_local_scalar_dense":
            return 0.0
        if name == "equal":
            return args[0].shape == args[1].shape
        if name == "copy_" and not isinstance(args[0], FakeTensor):
            return args[0].zero_()
        if name == "_to_copy" and device.type != NAME:
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if name.endswith("_") and name not in _SHAPES:
            if isinstance(args[0], FakeTensor) and not _is_integral(args[0].dtype) and _values(args[0]) is not None:
                args[0].known.zero_()
            return args[0] if op._schema.returns else None

        def fake(value: Any) -> Any:
            if isinstance(value, Tensor) and not isinstance(value, FakeTensor) and value.dim():
                return value.to("meta")
            if isinstance(value, torch.device):
                return torch.device("meta")
            return None if isinstance(value, torch.Generator) else value

        def drawn(found: Any) -> Any:
            if isinstance(found, FakeTensor) and _is_integral(found.dtype) and _values(found) is None:
                found.known = values = torch.zeros(found.shape, dtype=found.dtype)
                if found.dtype == torch.bool:
                    other = next((each for each in args if isinstance(each, (int, float))), None)
                    values.fill_((name, other) in _TRUE)
                elif name in _SELECT:
                    values.random_(2, max(3, args[0].shape[-1] if args[0].dim() else 3))
            return found

        return _mapped(drawn, self._made(device, op, _mapped(fake, args), _mapped(fake, kwargs)))

    def _made(self, device: torch.device, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The results of an operation on meta, as tensors of the device."""
        with in_kernel_invocation_manager(self.fakes):
            found = op(*args, **kwargs)
        return _mapped(partial(_on_device, device), found)


def kernels_of(name: str, args: Any) -> int:
    """The kernels that CUDA starts for an operation that computes something."""
    if not name.startswith(("_foreach_", "_fused_adam")):
        return 1
    lists = [each for each in args if isinstance(each, (list, tuple)) and each and isinstance(each[0], Tensor)]
    return -(-len(lists[0]) // _TENSORS_PER_KERNEL[min(len(lists), len(_TENSORS_PER_KERNEL)) - 1])


def _count(name: str, op: Any, args: Any, kwargs: Any, found: Any, given: list[Any], device: torch.device) -> None:
    """Add a call to the phase."""
    now = ledger.now
    now.kernels += kernels_of(name, args)
    formula = flop_registry.get(op.overloadpacket)
    flops = 0 if formula is None else formula(*args, **kwargs, out_val=found)
    if device.type == NAME and device.index:
        now.flops_elsewhere += flops
        return
    now.flops += flops
    new = [each for each in tree_iter(found) if isinstance(each, FakeTensor) and not any(each is one for one in given)]
    now.moved += sum(each.numel() * each.element_size() for each in (*given, *new))
