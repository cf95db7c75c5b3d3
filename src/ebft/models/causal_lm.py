"""Access to the parts of a transformers causal LM: backbone, decoder layers, train and eval mode."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from accelerate import PartialState
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import distributed, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ebft.catalog import TASKS
from ebft.errors import ModelError
from ebft.transformers_internals import switch_adapter

PLAIN = {torch.Tensor, torch.nn.Parameter}  # types of weights that are numbers and nothing else


def end_token_ids(model: nn.Module, known: Iterable[int] = ()) -> set[int]:
    """Return all tokens that end a text: the tokens of the generation config, and the `known` ones. The tokenizer and
    its chat template have others: `ebft.data.rendering.ChatTemplate.end_ids`."""
    generation_config = unwrap_adapter(model).generation_config
    declared = generation_config.eos_token_id if generation_config is not None else None
    declared = [declared] if isinstance(declared, int) else declared or []
    return {*declared, *known}


def unknown_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> range:
    """Return the ids of the model's vocabulary after the last one of the tokenizer; they have no text to sample."""
    size = unwrap_adapter(model).config.get_text_config().vocab_size
    return range(max(tokenizer.get_vocab().values(), default=size - 1) + 1, size)


def unwrap_adapter(model: nn.Module) -> PreTrainedModel:
    """The causal LM itself, unwrapped from a PEFT adapter if there is one, and from an engine of DeepSpeed."""
    if type(model).__name__ == "DeepSpeedEngine":  # around the reference model of TRL
        model = model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def positions_of(model: nn.Module) -> int | None:
    """The largest number of positions of a causal LM, with or without adapter; None if it has no limit."""
    return getattr(unwrap_adapter(model).config.get_text_config(), "max_position_embeddings", None)


def backbone_name(causal_lm: PreTrainedModel) -> str:
    """The attribute that contains the decoder, without the language-model head."""
    if isinstance(causal_lm._modules.get(causal_lm.base_model_prefix), PreTrainedModel):
        return causal_lm.base_model_prefix
    names = [name for name, child in causal_lm.named_children() if isinstance(child, PreTrainedModel)]
    if len(names) != 1:
        raise ModelError(f"{type(causal_lm).__name__} is no causal LM with one decoder: it has {names or 'none'}")
    return names[0]


def backbone_of(causal_lm: PreTrainedModel) -> nn.Module:
    """The decoder, without the language-model head."""
    return causal_lm._modules[backbone_name(causal_lm)]


def layers_at(causal_lm: PreTrainedModel) -> tuple[nn.Module, str]:
    """The module that owns the decoder layers, and the name of its ModuleList."""
    if "_decoder_layers_at" not in causal_lm.__dict__:  # cached, because truncation changes what a search finds
        depth = causal_lm.config.get_text_config().num_hidden_layers
        children = ((own, *each) for own in backbone_of(causal_lm).modules() for each in own.named_children())
        is_stack = lambda child: isinstance(child, nn.ModuleList) and len(child) == depth
        found = next(((own, name) for own, name, child in children if is_stack(child)), None)
        if found is None:
            raise ModelError(f"{type(causal_lm).__name__} does not keep its {depth} decoder layers in a ModuleList")
        causal_lm.__dict__["_decoder_layers_at"] = found
    return causal_lm.__dict__["_decoder_layers_at"]


def decoder_layers(causal_lm: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers that a forward pass runs through, in order."""
    return getattr(*layers_at(causal_lm))


@contextmanager
def first_layers(causal_lm: PreTrainedModel, count: int) -> Iterator[nn.ModuleList]:
    """Context manager in which the decoder consists of its first `count` layers only, and then its final norm."""
    owner, name = layers_at(causal_lm)
    layers = getattr(owner, name)
    owner._modules[name] = layers[:count]
    try:
        yield owner._modules[name]
    finally:
        owner._modules[name] = layers


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The modules of `model.modules()`, whose nested generators take four times as long."""
    found, seen = [model], {model}
    for module in found:
        new = dict.fromkeys(child for child in module._modules.values() if child is not None and child not in seen)
        seen.update(new)
        found += new
    return found


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context manager for eval mode without gradients; restores the previous mode of every module afterwards."""
    training = [vars(module) for module in modules_of(model) if module.training]
    try:
        for attributes in training:  # not by `setattr`, which looks for a parameter of this name first
            attributes["training"] = False
        with torch.no_grad():
            yield
    finally:
        for attributes in training:
            attributes["training"] = True


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Context manager in which the adapters of a PEFT model are disabled, without gradients.

    As `PeftModel.disable_adapter`, which also inspects all layers for its warnings, and freezes their parameters.
    """
    layers = [each for each in modules_of(model) if isinstance(each, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
    enabled = [layer for layer in layers if not layer.disable_adapters]
    with nullcontext() if layers else model.disable_adapter():
        try:
            for layer in enabled:
                switch_adapter(layer, on=False)
            yield
        finally:
            for layer in enabled:
                switch_adapter(layer, on=True)


class WithoutHooks(nn.Module):
    """Runs the forward of `inner` without the hooks of `inner`, with the same parameters; it may have hooks itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.__dict__["inner"] = inner  # not as a submodule: the parameters belong to the model

    def __getattr__(self, name: str) -> Any:
        if "inner" not in self.__dict__:  # while it is being copied
            raise AttributeError(name)
        return getattr(self.__dict__["inner"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.forward(*args, **kwargs)


def without_hooks(module: nn.Module) -> WithoutHooks:
    """Return `module` without its hooks, the same object in every call."""
    if "without_hooks" not in module.__dict__:
        module.__dict__["without_hooks"] = WithoutHooks(module)
    return module.__dict__["without_hooks"]


def frozen_copy(model: nn.Module) -> PreTrainedModel:
    """Return a copy of the causal LM in `model` that is not trained, with the weights of the first process."""
    frozen = copy.deepcopy(unwrap_adapter(model)).requires_grad_(False).eval()
    is_one_of_many = distributed.is_initialized() and distributed.get_world_size() > 1
    if os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "").lower() == "true" and is_one_of_many:
        # FSDP with `cpu_ram_efficient_loading` loads weights on rank 0 only and broadcasts them when training starts.
        for tensor in (*frozen.parameters(), *frozen.buffers()):
            shared = tensor.detach().to(PartialState().device)
            distributed.broadcast(shared, 0)
            tensor.detach().copy_(shared)
    return frozen


# What counts products by hooks of modules, such as `FlopMeter`, and is told here of others.
observers: list[Any] = []


def report_product(weight: torch.Tensor, rows: int) -> None:
    """Tell the observers of `rows` rows that were multiplied with a weight outside of its module."""
    for observer in observers:
        observer.count_product(weight, rows)


@contextmanager
def recorded_products() -> Iterator[Callable[[], None]]:
    """Context manager whose products are recorded; the function that it gives tells the observers of one repetition."""
    with ExitStack() as during:
        reports = [during.enter_context(observer.recording()) for observer in observers]
        yield lambda: [report() for report in reports] and None


def mark_reused(output: torch.Tensor) -> torch.Tensor:
    """Mark the output of a linear layer as one that was computed before."""
    output.__dict__["is_reused"] = True
    return output


def is_reused(output: torch.Tensor) -> bool:
    """Whether a linear layer returned `output` without multiplying."""
    return "is_reused" in output.__dict__


@dataclass(frozen=True)
class HeadType:
    """A kind of output layer: the class that loads it, and the number of its outputs; None for the vocabulary."""

    auto_class: type
    num_labels: int | None = None


LANGUAGE = HeadType(transformers.AutoModelForCausalLM)
SCORE = HeadType(transformers.AutoModelForSequenceClassification, 1)


def step_head(num_labels: int) -> HeadType:
    """The head that classifies tokens; those that end a step are trained on."""
    return HeadType(transformers.AutoModelForTokenClassification, num_labels)


def task_type(model: nn.Module) -> str:
    """PEFT's name of the task of a model, by its class."""
    name = type(model).__name__
    return next((task for ending, task in TASKS.items() if name.endswith(ending)), "CAUSAL_LM")


def head_modules(model: PreTrainedModel) -> list[str]:
    """The names of the linear layers that a classifier has in addition to its backbone; none for a language model."""
    if task_type(model) == "CAUSAL_LM":
        return []
    found = [name for name, child in model.named_children() if isinstance(child, nn.Linear)]
    if len(found) != 1:
        raise ModelError(f"{type(model).__name__} is no decoder with one linear layer: it has {found or 'none'}")
    return found
