"""What makes passes on an accelerator cheaper with equal results: fewer kernels, since each takes time to launch.

`fuse(module)` lets norms and rotary embeddings of the form that Llama's have, as most families have, run in one and
four kernels instead of six to eight and ten. `cheap_adapters(model)` adds LoRA adapters to the weights, or else to the
layer's product, for as long as no gradient is needed. On CPU, where small operations cost little, modules and weights
are left as they are.

    T  tokens    H  query heads    K  key heads    D  head dimension    O, I  features    r  rank of an adapter
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ebft.errors import doing
from ebft.models.causal_lm import PLAIN, modules_of, recorded_products, report_product
from ebft.models.sharding import is_sharded
from ebft.transformers_internals import apply_rotary_pos_emb, rms_norm_of_llama, rotate_half


def is_accelerator(device: torch.device) -> bool:
    """Whether it takes longer to launch a small kernel on the device than to run it."""
    return device.type != "cpu"


def fuse(module: nn.Module) -> None:
    """Let a norm or an attention layer use fewer kernels on accelerators, if its code is Llama's."""
    forward = type(module).forward
    if "forward" in module.__dict__ or not isinstance(forward, FunctionType):
        return
    if forward.__globals__["__name__"] == "transformers.utils.deprecation":  # a decorator that renames arguments
        forward = unwrap(forward)
    if _is_same(forward, rms_norm_of_llama):
        module.forward = MethodType(_rms_norm, module)
    elif "apply_rotary_pos_emb" in forward.__code__.co_names and forward.__closure__ is None:
        names = forward.__globals__
        if all(_is_same(names.get(each.__name__), each) for each in (apply_rotary_pos_emb, rotate_half)):
            # The function of the layer, with another rotary embedding among its global names.
            names = {**names, "apply_rotary_pos_emb": rotate}
            copied = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__)
            copied.__kwdefaults__ = forward.__kwdefaults__
            module.forward = MethodType(copied, module)


def _is_same(function: Any, reference: Any) -> bool:
    """Whether two functions compute the same: equal bytecode, with other annotations and documentation."""
    if not isinstance(function, FunctionType) or function.__closure__ is not None:
        return False
    return _computation(function.__code__, function.__doc__) == _computation(reference.__code__, reference.__doc__)


def _computation(code: CodeType, documentation: str | None) -> tuple[Any, ...]:
    constants = tuple(None if value == documentation else value for value in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, constants


def _rms_norm(self: nn.Module, hidden_states: Tensor) -> Tensor:
    """`LlamaRMSNorm.forward`: in float32, rounded before the product with the weight."""
    weight, dtype = self.weight, hidden_states.dtype
    is_usual = weight.shape == hidden_states.shape[-1:] and dtype != torch.float64  # others have a weight per head
    if not is_usual or not is_accelerator(hidden_states.device):
        return rms_norm_of_llama(self, hidden_states)
    if dtype == weight.dtype == torch.float32:
        return F.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)
    return weight * F.rms_norm(hidden_states, weight.shape, None, self.variance_epsilon).to(dtype)


_rms_norm.__name__ = "forward"  # by which pickle finds a bound method: in a model that is loaded, it is the class's own


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb` of Llama for query (1, H, T, D) and key (1, K, T, D), in one tensor on accelerators."""
    if not is_accelerator(q.device) or unsqueeze_dim != 1 or q.dtype != k.dtype:
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
    both = torch.cat([q, k], 1)
    turned = both.roll(both.shape[-1] // 2, -1)  # as rotate_half, whose minus is in the table
    if "signed" not in sin.__dict__:  # made once for all layers that are given the same tensor
        low, high = sin.chunk(2, -1)
        sin.__dict__["signed"] = torch.cat([-low, high], -1)
    product, table = both * cos.unsqueeze(1), sin.__dict__["signed"].unsqueeze(1)
    if product.dtype == turned.dtype == table.dtype:
        rotated = torch.addcmul(product, turned, table)
    else:
        rotated = product + turned * table
    query, key = rotated.split([q.shape[1], k.shape[1]], 1)
    return query, key


def can_record(device: torch.device) -> bool:
    """Whether `Recording` is possible on the device."""
    return device.type == "cuda"


# The stream for recording, and the last graph, whose memory the next one uses again: only one is in use at a time.
_recordings: dict[str, Any] = {}


class Recording:
    """What a function computes from tensors, as a CUDA graph: each call reads and writes the same memory.

    The function must not read values on the host, and its kernels must have run before.
    """

    def __init__(self, function: Callable[..., Tensor], *inputs: Tensor):
        stream = _recordings.setdefault("stream", torch.cuda.Stream())
        last, self._graph = _recordings.get("last"), torch.cuda.CUDAGraph()
        self._inputs = [each.clone() for each in inputs]
        # Not `torch.cuda.graph`, which collects garbage and gives all memory back before it records.
        stream.wait_stream(torch.cuda.current_stream())
        what = doing("recording a pass as a CUDA graph, which ebft.cuda_graphs: false does without")
        with what, torch.cuda.stream(stream), recorded_products() as self._report:
            # Other threads, which load data or wait for other processes, may call CUDA meanwhile.
            self._graph.capture_begin(pool=last and last.pool(), capture_error_mode="thread_local")
            try:
                self._result = function(*self._inputs)
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        _recordings["last"] = self._graph

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the function's result for inputs of the same shapes, valid until the next call."""
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._graph.replay()
        self._report()
        return self._result


# Adapters are folded if the sums of weights and adapters take at most this share of the device's memory.
_MOST_MEMORY = 1 / 8


@contextmanager
def cheap_adapters(causal_lm: PreTrainedModel) -> Iterator[None]:
    """Context manager in which LoRA layers take fewer kernels, on accelerators and without gradients.

    In float32, layers use the sum of weight and adapter, a new tensor beside the weight, which is not changed. Memory
    grows by the float32 weights of the adapted layers; if these take more than `_MOST_MEMORY`, and with autocast or
    other dtypes, in which the sum would lose most of the adapter, its product is added to the layer's by two kernels
    instead of four. Layers with other functions than plain LoRA are left as they are: DoRA, a bias, dropout that is
    not switched off, and weights that are quantised or sharded.
    """
    layers: list[LoraLinear] = []
    if not torch.is_grad_enabled() and is_accelerator(causal_lm.device) and not is_sharded(causal_lm):
        layers = [module for module in modules_of(causal_lm) if type(module) is LoraLinear and _is_plain(module)]
    dtypes = {weight.dtype for layer in layers for weight in _weights(layer)}
    is_exact = dtypes == {torch.float32} and not torch.is_autocast_enabled(causal_lm.device.type)
    size = sum(layer.base_layer.weight.nbytes for layer in layers)
    folds = is_exact and size <= _MOST_MEMORY * _memory(causal_lm.device)
    try:
        for layer in layers:
            layer.forward = _folded(layer) if folds else _adding(layer)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _folded(layer: LoraLinear) -> Callable[[Tensor], Tensor]:
    """Return PEFT's forward of a LoRA layer, with the sum of weight and adapters as its weight."""
    base = layer.base_layer
    folded = base.weight  # (O, I)
    for name in _names(layer):
        up, down = layer.lora_B[name].weight, layer.lora_A[name].weight  # (O, r), (r, I)
        folded = torch.addmm(folded, up, down, alpha=layer.scaling[name])
        report_product(base.weight, up.shape[1])

    def forward(x: Tensor) -> Tensor:
        report_product(base.weight, x.numel() // x.shape[-1])
        return F.linear(x, folded, base.bias)

    return forward


def _adding(layer: LoraLinear) -> Callable[[Tensor], Tensor]:
    """Return PEFT's forward of a LoRA layer, with scaling and sum as part of a product, in the dtype of the weight. The
    adapters are thus rounded as with autocast, by far less than the layer's output."""
    base, names = layer.base_layer, _names(layer)
    weights = [(layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]) for name in names]
    rounded = [(down.to(base.weight.dtype), up.to(base.weight.dtype)) for down, up, _ in weights]

    def forward(x: Tensor) -> Tensor:
        result = base(x)
        rows = result.flatten(0, -2)
        for (of_down, of_up, scaling), (down, up) in zip(weights, rounded):
            rows = torch.addmm(rows, F.linear(x, down).flatten(0, -2), up.mT, alpha=scaling)
            report_product(of_down, len(rows))
            report_product(of_up, len(rows))
        return rows.view(result.shape)

    return forward


def _is_plain(layer: LoraLinear) -> bool:
    base, names = layer.base_layer, _names(layer)
    drops = [layer.lora_dropout[name] for name in names]
    if not names or layer.disable_adapters or layer.merged or layer.fan_in_fan_out or type(base) is not nn.Linear:
        return False
    return (
        all({type(each), type(each.data)} <= PLAIN for each in _weights(layer))
        and len({each.device for each in _weights(layer)}) == 1
        and "forward" not in layer.__dict__
        and not any(name in layer.lora_variant or layer.lora_bias.get(name) for name in names)
        and not any(drop.training and not isinstance(drop, nn.Identity) for drop in drops)
    )


def _names(layer: LoraLinear) -> list[str]:
    """Return the names of the adapters that a layer uses."""
    return [name for name in layer.active_adapters if name in layer.lora_A]


def _weights(layer: LoraLinear) -> list[nn.Parameter]:
    adapters = [part[name].weight for name in _names(layer) for part in (layer.lora_A, layer.lora_B)]
    return [layer.base_layer.weight, *adapters]


def _memory(device: torch.device) -> int:
    """Return the bytes of the device's memory; 0 if PyTorch does not tell."""
    module = torch.get_device_module(device)
    return module.get_device_properties(device).total_memory if hasattr(module, "get_device_properties") else 0
