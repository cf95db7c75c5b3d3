"""All use of undocumented and private interfaces of transformers.

Undocumented names are imported in this file only, and private attributes are accessed in this file only;
tests/test_contracts.py checks both against the installed release. Some names are imported for other files.
"""
# ruff: noqa: F401

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, fields
from inspect import isfunction, signature, unwrap
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.integrations.gguf.reader import read_gguf_metadata
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.masking_utils import causal_mask_function
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb, rotate_half
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.utils import (
    ModelOutput,
    is_flash_attn_2_available,
    is_flash_attn_3_available,
    is_torch_tf32_available,
)
from transformers.utils.quantization_config import QuantizationMethod

rms_norm_of_llama = LlamaRMSNorm.forward


def has_running_state(causal_lm: PreTrainedModel) -> bool:
    """Whether layers keep a recurrent state of previous tokens instead of their keys and values."""
    return causal_lm._is_stateful


def layers_with_states(model: nn.Module) -> Iterator[nn.Module]:
    """The layers that read their states from transformers' cache, and continue from them with several tokens."""
    for module in model.modules():
        functions = [unwrap(each).__code__ for each in vars(type(module)).values() if isfunction(each)]
        reading = [code for code in functions if "get_conv_state" in code.co_names]
        keywords = {name for code in reading for each in code.co_consts if isinstance(each, tuple) for name in each}
        is_scan = any("get_recurrent_state" in code.co_names for code in reading)
        if reading and (not is_scan or not keywords.isdisjoint(("initial_state", "initial_states"))):
            yield module


def cache_argument(model: nn.Module) -> str:
    """Return the name of the argument for the cache: `cache` since transformers 5.24, where the older name warns."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


def checkpointing_argument() -> str:
    """Return TrainingArguments' name for gradient checkpointing: since transformers 5.24, the older name warns."""
    names = {argument.name for argument in fields(TrainingArguments)}
    return "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"


def rename_checkpointing(args: TrainingArguments) -> None:
    """Set the arguments for gradient checkpointing under the names that do not warn, unless these are set."""
    for ending in ("", "_kwargs"):
        name = f"{checkpointing_argument()}{ending}"
        if getattr(args, name) is None:
            setattr(args, name, getattr(args, f"gradient_checkpointing{ending}"))


def seeded_groups(sampler: Any, seed: int) -> Any:
    """Return a sampler that groups rows by length as one whose order follows from the seed; others unchanged."""
    return _SeededLengthGroups(sampler, seed) if type(sampler) is LengthGroupedSampler else sampler


class _SeededLengthGroups(LengthGroupedSampler):
    """A LengthGroupedSampler whose order follows from seed and epoch, not from the state of the global generator."""

    def __init__(self, plain: LengthGroupedSampler, seed: int) -> None:
        super().__init__(plain.batch_size, lengths=plain.lengths)
        self._seed, self._epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order is next."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator: torch.Generator = torch.Generator().manual_seed(self._seed + self._epoch)
        return super().__iter__()


def use_one_gpu(args: TrainingArguments) -> None:
    """Prevent a process with several GPUs from using DataParallel, which would split batches that belong together."""
    args._n_gpu = min(args.n_gpu, 1)


def switch_adapter(layer: nn.Module, on: bool) -> None:
    """Let a layer of PEFT use its adapter or not; `enable_adapters` also freezes its parameters."""
    layer._disable_adapters = not on


def load_weights(trainer: Trainer, folder: str) -> None:
    """Load the weights or the adapter of a checkpoint into the trainer's model."""
    trainer._load_from_checkpoint(folder)


def end_progress_bars() -> None:
    """Close all progress bars, also of other libraries; tqdm has no public list."""
    for bar in list(tqdm._instances):
        bar.close()


def save_final_weights(trainer: Trainer, folder: str) -> None:
    """Save the model and its tokenizer in `folder`, without a push to the Hub."""
    trainer.save_model(folder, _internal_call=True)


def check_tied_weights(model: PreTrainedModel) -> None:
    """Raise RuntimeError if weights share memory in a way that transformers does not save."""
    remove_tied_weights_from_state_dict(model.state_dict(), model)


def forget_title(config: PretrainedConfig) -> None:
    """Remove the model title of a GGUF file from the configuration, since it is not the name of a folder."""
    if hasattr(config, "_model_name_or_path"):
        del config._model_name_or_path


def hooks_of(module: nn.Module) -> list[Callable]:
    """The hooks that run with the module's forward or backward."""
    forward = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return forward + [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]


def takes_attention_functions(causal_lm: PreTrainedModel) -> bool:
    """Whether the model's attention uses the functions registered with `AttentionInterface`."""
    return causal_lm._supports_attention_backend


def attention_of(causal_lm: PreTrainedModel) -> str:
    """The name of the model's attention implementation."""
    return causal_lm.config._attn_implementation


def has_flash_attention(causal_lm: PreTrainedModel) -> bool:
    """Whether the model uses a flash attention, from its package or from the Hub."""
    return "flash" in attention_of(causal_lm)


def switch_attention(module: nn.Module, implementation: str) -> str:
    """Set the attention implementation of a module with a `config`, and return the previous one."""
    config = module.config
    before = object.__getattribute__(config, "_attn_implementation_internal")  # ten times as fast as the property
    if before != implementation:  # setting it takes long, since configurations check what is set
        config._attn_implementation = implementation
    return before


def bloom_heads(attention: nn.Module, fused: Tensor) -> tuple[Tensor, ...]:
    """Split Bloom's fused projection into query, key and value (B, H, T, D)."""
    return attention._reshape(fused)


def falcon_heads(attention: nn.Module, fused: Tensor) -> tuple[Tensor, ...]:
    """Split Falcon's fused projection into query (B, T, H, D), and key and value (B, T, K, D)."""
    return attention._split_heads(fused)


def replace_scores(attention: nn.Module, function: Callable) -> None:
    """Set the method of GPT-J, CodeGen and GPT-Neo that attends from queries to keys, given query, key, value, mask.

    Since transformers 5.24, GPT-J and CodeGen use the attention interface and have no such method.
    """
    if hasattr(attention, "_attn"):
        attention._attn = MethodType(function, attention)


def plain_scores(attention: nn.Module, *args: Tensor | None) -> tuple[Tensor, Tensor]:
    """Call the method that `replace_scores` replaced."""
    return type(attention)._attn(attention, *args)


@contextmanager
def override_attn_implementation(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Use another attention implementation ("eager", "sdpa", ...) inside the block; restored also after exceptions.

    For plain calls of a model. Strided passes switch the attention implementation themselves for every call.
    """
    before = switch_attention(model, implementation)
    try:
        yield
    finally:
        switch_attention(model, before)


@dataclass
class WeightGroup:
    """Weights of a checkpoint that transformers converts together into weights of the model when it loads them.

    Most groups are one weight, perhaps under another name; experts, for example, are stacked into one weight of the
    model. `names` is empty if the model has no such weight, which transformers ignores.
    """

    keys: list[str]  # in the checkpoint
    names: list[str]  # in the model
    patterns: list[str] = field(default_factory=list)  # the converter's pattern of each key
    converter: WeightConverter | None = None


# Names of weights in checkpoints of multimodal models, and in their text model alone.
TEXT_NAMES = {
    r"^language_model\.lm_head\.": "lm_head.",
    r"^language_model\.model\.": "model.",
    r"^model\.language_model\.": "model.",
    r"^model\.text_model\.": "model.",
}


def forget_text_names(model: PreTrainedModel) -> bool:
    """Let `model` be saved under its own names; returns whether it was loaded from other names, `TEXT_NAMES`."""
    before = getattr(model, "_weight_conversions", None) or []  # absent in models that were not loaded
    given = [pattern for entry in before for pattern in entry.source_patterns if pattern in TEXT_NAMES]
    if given:
        model._weight_conversions = [entry for entry in before if not set(given) & set(entry.source_patterns)]
        model.ebft_text_names = {TEXT_NAMES[pattern]: pattern.strip("^").replace("\\", "") for pattern in given}
    return bool(given)


def name_in_checkpoint(model: PreTrainedModel, name: str) -> str:
    """The name of a parameter or module in the multimodal checkpoint that the text model was loaded from, if any."""
    prefixes = getattr(model, "ebft_text_names", {})  # of such a model
    return next((given + name.removeprefix(own) for own, given in prefixes.items() if name.startswith(own)), name)


def send_as_in_checkpoint(generation: Any, model: PreTrainedModel) -> None:
    """Let TRL's VLLMGeneration send weights under the names in the checkpoint that the model was loaded from."""
    weights = generation._iter_named_params
    generation._iter_named_params = lambda: ((name_in_checkpoint(model, name), value) for name, value in weights())


def stored_names(model: PreTrainedModel) -> dict[str, list[str]]:
    """For each parameter of a model, the names of the weights in its checkpoints that it is made of."""
    revert = lambda name, own: list(revert_weight_conversion(model, {name: own.to("meta")}))
    return {name: revert(name, own) for name, own in model.named_parameters()}


def weight_groups(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> list[WeightGroup]:
    """Group the weights of a checkpoint (on the meta device) as `from_pretrained` converts them for `model`."""
    conversions = get_model_conversion_mapping(model, TEXT_NAMES)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    own, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, WeightGroup] = {}
    for key in sorted(weights, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, own)
        if name not in own and key in own:
            name, pattern = rename_source_key(key, [], [], prefix, own)
        if name not in own:
            found[f"{key} (not in the model)"] = WeightGroup([key], [])
        elif pattern is None:
            found.setdefault(name, WeightGroup([], [name])).keys.append(key)
        else:
            group = found.setdefault(name, WeightGroup([], [name], converter=by_pattern[pattern]))
            group.keys.append(key)
            group.patterns.append(pattern)
    model._weight_conversions = [entry for entry in conversions if entry.was_used()]
    for group in found.values():
        if group.converter is not None:
            group.names = list(convert_weights(model, group, weights))
    return list(found.values())


def convert_weights(model: PreTrainedModel, group: WeightGroup, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's weights, by name, from the checkpoint's weights of a group; views where no conversion is needed."""
    if group.converter is None:
        return {name: weights[group.keys[0]] for name in group.names}
    converter, first = deepcopy(group.converter), group.names[0]
    for key, pattern in zip(group.keys, group.patterns):
        converter.add_tensor(first, key, pattern, weights[key])
    converted = converter.convert(first, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def revert_weights(model: PreTrainedModel, group: WeightGroup, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint's weights of a group from the model's; needs `weight_groups` of the same model before."""
    if group.converter is None:
        return {group.keys[0]: weights[group.names[0]]}
    return revert_weight_conversion(model, {name: weights[name] for name in group.names})
