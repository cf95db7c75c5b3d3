"""FLOPs of matrix products, counted where they are computed: the linear layers and experts of the models in training.

A product of R rows with a weight of P numbers is 2 R P FLOPs. Its backward is 2 R P for the rows, where they need a
gradient, and 2 R P for the weight, where that is trained: with LoRA the frozen weights cost the first alone. What runs
twice counts twice (gradient checkpointing, the head in strided mode), and so does padding that a model is given. Left
out are attention between tokens, embeddings, routers of experts, and everything that is no matrix product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

from torch import Tensor, nn

from ebft.models.causal_lm import unwrap_adapter
from ebft.models.recording import is_replayed
from ebft.over_transformers import Conv1D


class FlopMeter:
    """FLOPs of the models that are watched, while counting is on."""

    def __init__(self) -> None:
        self.flops: int | Tensor = 0
        self._counting = False

    @contextmanager
    def watching(self, models: Iterable[nn.Module]) -> Iterator[None]:
        """Hooks on every matrix product of `models` inside the block; a module in several of them is hooked once."""
        models = list(models)
        modules = {id(module): module for model in models for module in model.modules() if weight_size(module)}
        hooks = [module.register_forward_hook(self._count, with_kwargs=True) for module in modules.values()]
        causal_lms = {id(unwrap_adapter(model)): unwrap_adapter(model) for model in models}.values()
        hooks += [model.register_forward_hook(self._count_fused_head, with_kwargs=True) for model in causal_lms]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what runs inside the block."""
        self._counting = True
        try:
            yield
        finally:
            self._counting = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what runs inside the block, nor what its backward passes run."""
        before, self._counting = self._counting, False
        try:
            yield
        finally:
            self._counting = before

    def _count(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook; the backward counts when its gradient arrives, so a recomputed forward brings none."""
        if not self._counting:
            return
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        flops = 2 * weight_size(module) * _rows(module, inputs)
        self.flops += 0 if isinstance(output, Tensor) and is_replayed(output) else flops
        outputs = [value for value in (output, *(output if isinstance(output, tuple) else ())) if _has_gradient(value)]
        if outputs:
            weights = (weight for weight in module.parameters(recurse=False) if weight.dim() > 1)
            trained = any(weight.requires_grad for weight in weights)
            outputs[0].register_hook(lambda _: self._add(flops * (inputs[0].requires_grad + trained)))

    def _count_fused_head(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook for TRL's log-probabilities, which take the head's weight and leave out its module.

        Scored positions are multiplied with it once, in backward once more, and once for each gradient.
        """
        if not (self._counting and kwargs.get("fused_lm_head")):
            return
        head = model.get_output_embeddings()
        flops = 2 * weight_size(head) * kwargs["labels"][:, 1:].ne(-100).sum()  # a tensor: nothing waits for it here
        self._add(flops)
        if output.log_probs.requires_grad:
            trained = head.weight.requires_grad
            output.log_probs.register_hook(lambda _: self._add(flops * (2 + trained)))

    def _add(self, flops: int | Tensor) -> None:
        if self._counting:
            self.flops += flops


def forward_flops(model: nn.Module, tokens: int, scored: int) -> int:
    """FLOPs of `tokens` tokens through the decoder and `scored` of them through the head, where another engine runs it.

    A token goes through `num_experts_per_tok` experts.
    """
    causal_lm = unwrap_adapter(model)
    of_head = {id(module) for module in causal_lm.get_output_embeddings().modules()}
    per_token, per_score = 0, 0
    for module in causal_lm.modules():
        if id(module) in of_head:
            per_score += weight_size(module)
        elif _experts(module):
            per_token += weight_size(module) * causal_lm.config.get_text_config().num_experts_per_tok
        else:
            per_token += weight_size(module)
    return 2 * (per_token * tokens + per_score * scored)


def weight_size(module: nn.Module) -> int:
    """Numbers in the matrix that one row is multiplied with; 0 for a module that multiplies with none of its own.

    From declared sizes where there are any: quantised and sharded weights hold fewer numbers.
    """
    if isinstance(module, nn.Linear):
        return module.in_features * module.out_features
    if isinstance(module, Conv1D):
        return module.nx * module.nf
    return sum(prod(weight.shape[1:]) for weight in _experts(module))


def _experts(module: nn.Module) -> list[nn.Parameter]:
    """Weights (experts, ., .) of a module that holds all of its experts in one tensor."""
    stacked = [weight for weight in module.parameters(recurse=False) if weight.dim() == 3]
    return stacked if type(module).__name__.endswith("Experts") else []


def _rows(module: nn.Module, inputs: list[Tensor]) -> int:
    """Rows that a forward pass multiplies: of its input, and of every expert that the router chose for them."""
    rows = inputs[0].numel() // max(1, inputs[0].shape[-1])
    if not _experts(module):
        return rows
    chosen = [value for value in inputs[1:] if not value.is_floating_point()]
    return rows * chosen[0].shape[-1] if chosen else rows


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
