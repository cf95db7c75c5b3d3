"""What makes passes on an accelerator cheaper with equal results: fewer kernels, each of which takes time to launch.

`fuse(module)` lets norms and rotary embeddings of the form that Llama's have, as those of most families, run in one and
four kernels instead of six to eight and ten. `folded_adapters(model)` adds LoRA adapters to the weights for as long as
no gradient is needed. On CPU, where a small operation costs little, modules and weights are left as they are.

    T  tokens    H  query heads    K  key heads    D  head dimension    O, I  features    r  rank of an adapter
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ebft.models.causal_lm import report_product
from ebft.models.sharding import is_sharded
from ebft.transformers_internals import apply_rotary_pos_emb, rms_norm_of_llama, rotate_half


def is_accelerator(device: torch.device) -> bool:
    """Whether it takes longer to launch a small kernel on the device than to run it."""
    return device.type != "cpu"


def fuse(module: nn.Module) -> None:
    """Let a norm or an attention layer use fewer kernels on accelerators, if its code is that of Llama's."""
    forward = type(module).forward
    if "forward" in module.__dict__ or not isinstance(forward, FunctionType):
        return
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
    if not is_accelerator(hidden_states.device) or dtype == torch.float64:
        return rms_norm_of_llama(self, hidden_states)
    if dtype == weight.dtype == torch.float32:
        return F.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)
    return weight * F.rms_norm(hidden_states, weight.shape, None, self.variance_epsilon).to(dtype)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb` of Llama for query (1, H, T, D) and key (1, K, T, D), in one tensor on accelerators."""
    if not is_accelerator(q.device) or unsqueeze_dim != 1 or q.dtype != k.dtype:
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
    both = torch.cat([q, k], 1)
    turned = both.roll(both.shape[-1] // 2, -1)  # as rotate_half, whose minus is in the table
    product, table = both * cos.unsqueeze(1), _signed(sin).unsqueeze(1)
    if product.dtype == turned.dtype == table.dtype:
        rotated = torch.addcmul(product, turned, table)
    else:
        rotated = product + turned * table
    query, key = rotated.split([q.shape[1], k.shape[1]], 1)
    return query, key


def _signed(sin: Tensor) -> Tensor:
    """Return `sin` (1, T, D) with its first half negated; made once for all layers that are given the same tensor."""
    kept = sin.__dict__
    if "signed" not in kept:
        low, high = sin.chunk(2, -1)
        kept["signed"] = torch.cat([-low, high], -1)
    return kept["signed"]


# Adapters are folded if the copies of their layers' weights take at most this share of the device's memory.
_MOST_MEMORY = 1 / 8


@contextmanager
def folded_adapters(causal_lm: PreTrainedModel) -> Iterator[None]:
    """Context manager in which LoRA layers use the sum of weight and adapter, without gradients, on accelerators.

    The sum is a new tensor beside the weight, which is not changed, so memory grows by the float32 weights of the
    adapted layers. Layers keep their adapters if these take more than `_MOST_MEMORY`, and where the sum would be
    rounded to fewer digits, be no matrix, or have other functions than plain LoRA: with weights that are not float32
    (as quantised ones), with autocast, sharding, DoRA, a bias, and dropout that is not switched off.
    """
    layers = [] if torch.is_grad_enabled() or not is_accelerator(causal_lm.device) else _foldable(causal_lm)
    if sum(layer.base_layer.weight.nbytes for layer in layers) > _MOST_MEMORY * _memory(causal_lm.device):
        layers = []
    before: list[tuple[LoraLinear, nn.Parameter]] = []
    try:
        for layer in layers:
            weight = layer.base_layer.weight
            before.append((layer, weight))
            merged, names = weight, [name for name in layer.active_adapters if name in layer.lora_A]
            for name in names:
                up, down = layer.lora_B[name].weight, layer.lora_A[name].weight  # (O, r), (r, I)
                merged = torch.addmm(merged, up, down, alpha=layer.scaling[name])
                report_product(weight, up.shape[1])
            layer.base_layer.weight = nn.Parameter(merged, requires_grad=False)
            layer.merged_adapters.extend(names)
        yield
    finally:
        for layer, weight in before:
            layer.merged_adapters.clear()
            layer.base_layer.weight = weight


def _foldable(causal_lm: PreTrainedModel) -> list[LoraLinear]:
    if is_sharded(causal_lm) or torch.is_autocast_enabled(causal_lm.device.type):
        return []
    return [module for module in causal_lm.modules() if type(module) is LoraLinear and _is_foldable(module)]


def _is_foldable(layer: LoraLinear) -> bool:
    base, names = layer.base_layer, [name for name in layer.active_adapters if name in layer.lora_A]
    if not names or layer.disable_adapters or layer.merged or layer.fan_in_fan_out or type(base) is not nn.Linear:
        return False
    weights = [base.weight, *(part[name].weight for name in names for part in (layer.lora_A, layer.lora_B))]
    is_plain = all(type(each) is nn.Parameter and type(each.data) is Tensor for each in weights)
    return (
        is_plain
        and {each.dtype for each in weights} == {torch.float32}
        and len({each.device for each in weights}) == 1
        and not any(name in layer.lora_variant or layer.lora_bias.get(name) for name in names)
        and not any(_drops(layer.lora_dropout[name]) for name in names)
    )


def _drops(dropout: nn.Module) -> bool:
    return dropout.training and not isinstance(dropout, nn.Identity)


def _memory(device: torch.device) -> int:
    """Return the bytes of the device's memory; 0 if PyTorch does not tell."""
    module = torch.get_device_module(device)
    return module.get_device_properties(device).total_memory if hasattr(module, "get_device_properties") else 0
