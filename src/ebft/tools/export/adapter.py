"""A LoRA adapter on a base model without weights: the base is on the meta device, the adapter in memory.

PEFT's own layers then compute what the adapter adds to a weight, once the weight is put in its place.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, PeftType, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ebft.catalog import refuse_classifier
from ebft.config.keys.models import ModelSettings
from ebft.errors import ModelError, doing, some_of
from ebft.files import ADAPTER_CONFIG as CONFIG
from ebft.models import adapter as saved
from ebft.models import adapter_targets, load, pretrained
from ebft.models.adapter import UNMATCHED_RANK, not_whole, saved_layers, saved_rows
from ebft.models.weights import functional, packed
from ebft.run.checkpoints import checkpoint_hint
from ebft.transformers_internals import get_keys_to_not_convert

# Options with which the adapter is no change of single weights, or which PEFT itself does not merge.
_NOT_MERGED = (
    *("layer_replication", "trainable_token_indices", "alora_invocation_tokens", "arrow_config", "megatron_config"),
    *("kasa_config", "monteclora_config", "velora_config", "use_bdlora"),
)


@dataclass
class Adapter:
    """An adapter and what it changes, by the names of the base model's parameters.

    `owners`: the module and attribute of each parameter. `layers`: PEFT's layers with the parameters that merging
    each changes. `replaced`: parameters that were trained fully (`modules_to_save`), or saved with the adapter.
    `base_ties`: parameters of the base model that share their weights with another one, as `{name: the other}`;
    `ties`: the ties that remain after merging.
    """

    model: PeftModel
    vocab_size: int  # rows of the input embedding, which may have been resized before training
    owners: dict[str, tuple[nn.Module, str]]
    layers: list[tuple[LoraLayer, list[str]]] = field(default_factory=list)
    replaced: dict[str, Tensor] = field(default_factory=dict)
    base_ties: dict[str, str] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)


def read_lora_config(folder: Path, base: str = "") -> LoraConfig:
    """The configuration of the LoRA adapter in `folder`, for `base`. Raises ModelError if it cannot be merged."""
    if not (folder / CONFIG).is_file() and (hint := checkpoint_hint(folder, "ebft merge-lora {}")):
        raise ModelError(f"{folder} does not contain an adapter. {hint}")
    config = saved.read_adapter_config(folder, base)
    refuse_classifier(folder, "ebft merge-lora, which merges adapters of language models, does not support it")
    if config.peft_type != PeftType.LORA:  # AdaLoRA has a LoraConfig too
        raise ModelError(f"{folder} is an adapter of type {config.peft_type}; only LoRA adapters can be merged.")
    initial = config.init_lora_weights
    if isinstance(initial, str) and initial.lower().startswith((*pretrained.REWRITE_BASE, "mica")):
        raise ModelError(
            f"{folder} modified the base weights (init_lora_weights={initial!r}). Convert it with PEFT: "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...)."
        )
    # PEFT moves or adds such options between releases; an absent one is not set.
    used = [name for name in _NOT_MERGED if getattr(config, name, None)]
    if used:
        raise ModelError(f"{folder} uses {', '.join(used)}, which cannot be merged into the weights of the base model.")
    return config


def empty_model(config: Any, trust_remote_code: bool = False) -> PreTrainedModel:
    """The causal language model of a transformers configuration, on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def attach(base: PreTrainedModel, config: LoraConfig, weights: dict[str, Tensor]) -> Adapter:
    """The adapter on `base`, a model on the meta device, whose embeddings get as many rows as the adapter's.

    Raises ModelError if a weight of the adapter belongs to no part of the model or has another shape, or if the adapter
    has no weights for a part that it should change.
    """
    # PEFT saves a second copy of embeddings that were resized and trained fully.
    for name in [name for name in weights if ".modules_to_save." in name]:
        trained = weights.get(name.replace(".modules_to_save.", "."))
        if trained is not None and torch.equal(trained, weights[name]):
            weights = {other: value for other, value in weights.items() if other != name}
    rows = saved_rows(base, weights)  # with the added tokens
    if rows is not None and rows != base.get_input_embeddings().num_embeddings:
        present, absent = saved_layers(base, weights)
        if absent:
            raise ModelError(f"{not_whole('The adapter', rows, present, absent)}.")
        base.resize_token_embeddings(rows, mean_resizing=False)
    vocab_size = base.get_input_embeddings().num_embeddings
    modules = {id(module): name for name, module in base.named_modules()}
    parameters = dict(base.named_parameters(remove_duplicate=False))
    owners = {name: (base.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in parameters}
    # Parameters that are the same object as another one, the input embedding if it is among them.
    first: dict[int, str] = {}
    for name in sorted(parameters, key=lambda name: owners[name][0] is not base.get_input_embeddings()):
        first.setdefault(id(parameters[name]), name)
    ties = {name: first[id(value)] for name, value in parameters.items() if first[id(value)] != name}
    config.init_lora_weights = True  # the initial values are replaced
    config.inference_mode = True
    with doing("attaching the adapter to the base model"):
        with warnings.catch_warnings():
            # That merging tied weights "can lead to complications", which _end_ties avoids.
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
            # That the base model is another one than in training, which the user has chosen.
            warnings.filterwarnings("ignore", message=".*`base_model_name_or_path` was renamed")
            warnings.filterwarnings("ignore", message=UNMATCHED_RANK)
            model = get_peft_model(base, config, low_cpu_mem_usage=True)
        _allocate(model, weights)
        unknown = set_peft_model_state_dict(model, weights).unexpected_keys
    if unknown:
        raise ModelError(
            f"{len(unknown)} weights of the adapter are not in this base model (--base-model): {some_of(unknown, 3)}."
        )
    adapter = Adapter(model, vocab_size, owners, base_ties=ties, ties=dict(ties))
    for name, (module, attribute) in owners.items():
        if not (own := getattr(module, attribute)).is_meta:
            adapter.replaced[name] = own.data
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            prefix = modules[id(module.original_module)]
            for name, value in module.modules_to_save["default"].state_dict().items():
                adapter.replaced[f"{prefix}.{name}"] = value
        elif isinstance(module, LoraLayer):
            prefix = modules[id(module.get_base_layer())]
            names = [f"{prefix}.weight", *([f"{prefix}.bias"] if any(module.lora_bias.values()) else [])]
            of_parameter = isinstance(module, ParamWrapper)
            adapter.layers.append((module, [f"{prefix}.{module.parameter_name}"] if of_parameter else names))
    _end_ties(adapter, config)
    # Parameters without weights still contain the NaN that they were allocated with.
    missing = [name for name, value in adapter.replaced.items() if value.isnan().any()]
    for layer, names in adapter.layers:
        if any(own.isnan().any() for own in layer.parameters() if not own.is_meta):
            missing += names
    if missing:
        raise ModelError(f"The adapter has no weights, or NaN, for {some_of(missing, 3)}.")
    return adapter


def merge_into(layer: LoraLayer, names: list[str], values: dict[str, Tensor], adapter: Adapter) -> None:
    """Replace the `values` of a layer's parameters `names` by the result of PEFT's `merge`."""
    for name in names:
        module, attribute = adapter.owners[name]
        setattr(module, attribute, nn.Parameter(values[name], requires_grad=False))
    with doing(f"merging the adapter into {names[0]}"):
        layer.merge()
    for name in names:
        module, attribute = adapter.owners[name]
        values[name] = getattr(module, attribute).data
        setattr(module, attribute, nn.Parameter(torch.empty_like(values[name], device="meta"), requires_grad=False))
    layer.merged_adapters.clear()


def _allocate(model: PeftModel, weights: dict[str, Tensor]) -> None:
    """Give what is saved with the adapter memory, filled with NaN, in float32, as PEFT keeps adapters."""
    saved = {id(value) for name, value in model.named_parameters(remove_duplicate=False) if name in weights}
    allocated: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for attribute, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            name = f"{path}.{attribute}"
            if ".lora_" in name or ".modules_to_save." in name or id(parameter) in saved:
                if id(parameter) not in allocated:
                    empty = torch.full(parameter.shape, torch.nan, dtype=torch.float32)
                    allocated[id(parameter)] = nn.Parameter(empty, requires_grad=False)
                setattr(module, attribute, allocated[id(parameter)])


def _end_ties(adapter: Adapter, config: LoraConfig) -> None:
    """Remove the ties of weights that differ after merging, because the adapter changes only one. Weights of embeddings
    that were resized without being trained are the same for both, and with `ensure_weight_tying` PEFT trains one change
    for both, which is merged once."""
    layers = {name: layer for layer, names in adapter.layers for name in names}
    for name, source in list(adapter.ties.items()):
        output, embedding, is_once = layers.get(name), layers.get(source), config.ensure_weight_tying
        if is_once and output is not None and embedding is not None:
            # The output layer repeats the layer of the embedding, transposed, or is not saved.
            pairs = [(output.lora_A, embedding.lora_embedding_B), (output.lora_B, embedding.lora_embedding_A)]
            own = [(linear["default"].weight, factor["default"].T) for linear, factor in pairs]
            is_once = all(one.isnan().all() or torch.equal(one, other) for one, other in own)
        if is_once:
            adapter.layers = [(layer, names) for layer, names in adapter.layers if name not in names]
            adapter.replaced.pop(name, None)
        else:
            one, other = adapter.replaced.get(name), adapter.replaced.get(source)
            is_same = one is other if one is None or other is None else torch.equal(one, other)
            if {name, source} & layers.keys() or not is_same:
                del adapter.ties[name]


class BitsAndBytesRounding:
    """Quantises and dequantises the weights of `model` that are loaded in 4 or 8 bits: linear layers, and experts.

    An adapter that was trained on such weights is added to the dequantised weights, so that the merged model
    is the one that was trained. `settings`: the keys of the run.
    """

    def __init__(self, model: PreTrainedModel, settings: ModelSettings) -> None:
        self._settings, self._dtype = settings, load.weights_dtype(settings)
        functional()  # raises without bitsandbytes
        kept = [*get_keys_to_not_convert(model), *load.not_quantised(settings, model.config)]
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        is_within = lambda name, other: name == other or name.startswith(f"{other}.") or name.endswith(f".{other}")
        self._names = {f"{name}.weight" for name in linear if not any(is_within(name, other) for other in kept)}
        self._names |= {*adapter_targets.fused_experts(model)} if settings.quantize_moe_experts else set()

    def covers(self, name: str) -> bool:
        """Whether a parameter of the model is quantised."""
        return name in self._names

    def __call__(self, weight: Tensor) -> Tensor:
        """The weight after quantisation, in its own dtype."""
        loaded = weight.to(self._dtype)
        if weight.dim() == 2 and not self._settings.load_in_4bit:  # of 8 bits, only experts are rounded again
            loaded = loaded.to(weight.dtype)
        with doing("quantising weights with bitsandbytes"):
            stored, restored = packed(loaded, self._settings)
            return restored(stored).view(weight.shape).to(weight.dtype)
