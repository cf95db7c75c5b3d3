"""LoRA adapters with PEFT: a new one, or a saved one to continue training.

The embeddings may have been resized before training: an adapter has to have all of their rows, or none.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft
from peft import LoraConfig, PeftConfig, PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from ebft.catalog import is_gguf, lasting_name, refuse_pointers
from ebft.errors import ModelError, doing, prefixed, shortened, some_of, warn
from ebft.files import ADAPTER_CONFIG
from ebft.models import adapter_targets as targets
from ebft.models.causal_lm import head_modules, task_type, unwrap_adapter
from ebft.models.weight_files import WeightFiles, adapter_file
from ebft.transformers_internals import stored_names

if TYPE_CHECKING:
    from ebft.config.keys.models import ModelSettings

# Keys of a config, and the settings of a saved adapter that replace them.
_SAVED_SETTINGS = {"lora_r": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
_SAVED_SETTINGS |= {"lora_target_modules": "target_modules", "lora_rank_pattern": "rank_pattern"}
_SAVED_SETTINGS |= {"lora_alpha_pattern": "alpha_pattern", "lora_modules_to_save": "modules_to_save"}
_SAVED_SETTINGS |= {"lora_target_parameters": "target_parameters", "peft_layers_to_transform": "layers_to_transform"}
_SAVED_SETTINGS |= {"peft_use_dora": "use_dora", "peft_use_rslora": "use_rslora"}
_TARGETS = ("target_modules", "target_linear", "target_linear_modules", "target_parameters", "modules_to_save")


def attach_adapter(model: PreTrainedModel, config: ModelSettings) -> PreTrainedModel | PeftModel:
    """`model` with the adapter of the config, or `model` itself if the config has none. Adapter weights are always
    float32. `lora_model_dir` continues training a saved adapter, whose settings take precedence. Raises ModelError if
    `lora_target_modules` or `lora_modules_to_save` match no module of the model."""
    if config.adapter is None:
        return freeze_except(model, config.unfrozen_parameters)
    if config.load_in_4bit or config.load_in_8bit:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if config.lora_model_dir is not None:
        return _saved_adapter(model, config)
    for wanted in config.lora_modules_to_save or []:  # suffixes of names; PEFT silently skips one that matches nothing
        if not any(name.endswith(wanted) for name, _ in model.named_modules()):
            known = sorted({name.rpartition(".")[2] for name, _ in model.named_modules()} - {""})
            shown = ", ".join(part for part in known if not part.isdecimal())
            raise ModelError(f"lora_modules_to_save: {wanted!r} matches no module. The modules are {shown}.")
    given = ", ".join(f"lora_{key}: {value}" for key in _TARGETS if (value := getattr(config, f"lora_{key}")))
    with doing(f"attaching an adapter to the model with {given}"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=UNMATCHED_RANK)
        return peft.get_peft_model(model, lora_config(model, config))


def lora_config(model: PreTrainedModel, config: ModelSettings) -> LoraConfig:
    """The PEFT config for the `lora_` keys; the head of a classifier is trained fully."""
    heads, layers = head_modules(model), config.peft_layers_to_transform
    depth = model.config.get_text_config().num_hidden_layers
    missing = [index for index in ([layers] if isinstance(layers, int) else layers or []) if index >= depth]
    if missing:  # which PEFT silently skips
        raise ModelError(f"peft_layers_to_transform: {missing[0]} is not a layer of the model, which has {depth}.")
    saved = {name.rpartition(".")[2] for name in config.lora_modules_to_save or ()}
    for layers_of_one in ({name.rpartition(".")[2] for name in names} for names in _embedding_layers(model)):
        if saved & layers_of_one and (frozen := layers_of_one - saved):
            warn(
                f"lora_modules_to_save: {', '.join(frozen)} keeps the weights that it shares in base_model. Add it to "
                "train both."
            )
    excluded = [*heads, *(targets.excluded_from_linear(model, config) if config.lora_target_linear else ())]
    return LoraConfig(
        task_type=task_type(model),
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        rank_pattern=config.lora_rank_pattern,
        alpha_pattern=config.lora_alpha_pattern,
        lora_dropout=config.lora_dropout,
        target_modules=targets.target_modules(model, config),
        target_parameters=targets.target_parameters(model, config.lora_target_parameters),
        use_dora=config.peft_use_dora,
        use_rslora=config.peft_use_rslora,
        layers_to_transform=layers,
        layers_pattern=config.peft_layers_pattern,
        init_lora_weights=config.peft_init_lora_weights,
        exclude_modules=excluded or None,
        modules_to_save=[*(config.lora_modules_to_save or []), *heads] or None,
    )


def _saved_adapter(model: PreTrainedModel, config: ModelSettings) -> PeftModel:
    folder = str(config.lora_model_dir)
    with prefixed("lora_model_dir"), doing(f"continuing the adapter lora_model_dir: {folder}"):
        loaded = load_saved_adapter(model, folder, is_trainable=True)
    for key, name in _SAVED_SETTINGS.items():
        wanted, found = getattr(config, key), getattr(loaded.active_peft_config, name, None)  # absent: not LoRA
        wanted, found = (set(value) if isinstance(value, list | set) else value for value in (wanted, found))
        if key in config.model_fields_set and wanted is not None and wanted != found:
            own = sorted(found) if isinstance(found, set) else found
            warn(f"{key}: {getattr(config, key)!r} has no effect: the adapter in lora_model_dir has {own!r}.")
    return loaded


# A warning of PEFT about the rank of fused experts, which it applies, but looks for among modules.
UNMATCHED_RANK = r"The following (rank|alpha)_pattern keys did not match any targeted module.*gate_up_proj"


def read_adapter_config(folder: Path, base: str = "") -> PeftConfig:
    """The settings of the adapter in `folder`, with a warning if it was trained on a model of another name than `base`,
    which may be stored elsewhere."""
    refuse_pointers(folder)
    with doing(f"reading {folder / ADAPTER_CONFIG}"):
        found = PeftConfig.from_pretrained(str(folder))
    trained_on = found.base_model_name_or_path
    if base and trained_on and Path(base).name.lower() != Path(trained_on).name.lower():
        warn(f"The adapter in {folder} was trained on {trained_on}; with {base}, it is another model.")
    return found


def check_tensors(path: Path) -> dict[str, Tensor]:
    """The names and shapes of the tensors of an adapter, on the meta device. Raises ModelError if a weight is NaN or
    infinite (training diverged)."""
    with WeightFiles([path]) as file:
        for name in file.weights:
            if not file.read(name).float().isfinite().all():  # absent for float8
                raise ModelError(f"{path} contains NaN or infinite values ({name}). Use an earlier checkpoint")
    return file.weights


def load_saved_adapter(model: PreTrainedModel, name: str, tokens: int | None = None, **options: Any) -> PeftModel:
    """`model` with the adapter in the folder `name`; `options` are passed to `PeftModel.from_pretrained`. The
    embeddings get the size of the adapter's, with a row for each of the `tokens` of the tokenizer; without the number,
    they never shrink. Raises ModelError if the adapter is of another task or does not fit in all its layers."""
    name = lasting_name(name)
    folder, stored = Path(name), {}
    if folder.is_dir():
        task, wanted = read_adapter_config(folder, model.name_or_path).task_type, task_type(model)
        if task != wanted and not {task, wanted}.isdisjoint(("SEQ_CLS", "TOKEN_CLS")):  # with another output layer
            raise ModelError(f"{folder} is an adapter of {task}, but the model has another output layer: {wanted}")
        path = adapter_file(folder)
        stored = check_tensors(path)
        _fit_to_adapter(model, path, stored, tokens)
    with doing(f"loading the adapter {name}"), warnings.catch_warnings(record=True, action="always") as caught:
        warnings.filterwarnings("ignore", message=UNMATCHED_RANK)
        loaded = PeftModel.from_pretrained(model, name, **options)
    for warning in caught:
        message = str(warning.message)
        if "missing adapter keys" in message:
            raise ModelError(f"the adapter in {name!r} is incomplete or of another base model: {shortened(message)}")
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    _check_all_used(loaded, name, stored)
    return loaded


def _check_all_used(model: PeftModel, name: str, stored: Collection[str]) -> None:
    """Raise ModelError if tensors of the adapter belong to no part of the model, which PEFT does not report."""
    own = {key.replace(".modules_to_save.default", "").replace(".default", "") for key in model.state_dict()}
    # Of embeddings that were resized and trained fully, PEFT saves a second copy.
    own |= {key for key in stored if ".modules_to_save." in key and key.replace(".modules_to_save.", ".") in stored}
    if own.issuperset(stored):
        return
    # PEFT converts names of other releases. A second time, loading changes nothing, but returns the names.
    left = set(model.load_adapter(name, "default", is_trainable=not model.active_peft_config.inference_mode)[1]) - own
    if left:
        raise ModelError(f"the adapter in {name!r} has tensors that belong to no part of the model: {some_of(left, 3)}")


def freeze_except(model: PreTrainedModel, patterns: list[str] | None) -> PreTrainedModel:
    """`model`, in which only the parameters with a name that matches one of `patterns` from the start are trained.
    None: all parameters stay trained. A parameter has names in the model, in its checkpoints, and in a multimodal
    model. Raises ModelError if no pattern matches one; if another does, one that matches none is a warning."""
    if patterns is None:
        return model
    names, stored = [name for name, _ in model.named_parameters()], stored_names(model)
    trained, without = set[str](), list[str]()
    for pattern in patterns:
        with doing(f"reading the regular expression {pattern!r:.200} of unfrozen_parameters"):
            found = [name for name in names if re.match(pattern, name)]
            if not found or not targets.excludes_names(pattern):
                found += _by_other_names(stored, pattern, found)
        trained.update(found)
        without += [] if found else [repr(pattern)]
    if without:
        problem = (
            f"unfrozen_parameters: {', '.join(without)} matches no parameter. Names are compared from the start, like "
            f"{list(stored)[len(stored) // 2]} and {list(stored)[-1]}; a layer with tied weights has the name of the "
            "first one."
        )
        if not trained:
            raise ModelError(problem)
        warn(problem)  # as in configs of axolotl for several models
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    return model


def _by_other_names(stored: dict[str, list[str]], pattern: str, found: Collection[str]) -> list[str]:
    """The parameters, without the `found` ones, whose names in checkpoints, all of their parts, match the pattern."""
    keys = {name: [name, *own] for name, own in stored.items() if name not in found}
    aliases = targets.in_whole_models(key for own in keys.values() for key in own)
    matched = {name for alias, name in aliases.items() if re.match(pattern, alias)}
    chosen = [name for name, own in stored.items() if name in keys and (name in matched or matched.issuperset(own))]
    for name in keys.keys() - {*chosen}:
        if parts := matched.intersection(stored[name]):
            raise ModelError(f"unfrozen_parameters: {pattern!r} matches {some_of(parts, 2)}, parts of {name}")
    return chosen


_SAVED_AS = (".weight", ".base_layer.weight")  # of layers that are saved whole, or have LoRA


def saved_rows(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> int | None:
    """The rows of the embeddings that the `weights` of an adapter have; None if they have none."""
    saved = (weights[key] for names in _embedding_layers(model) for key in _keys(names) if key in weights)
    return next((len(weight) for weight in saved if weight.dim()), None)


def saved_layers(model: PreTrainedModel, weights: Collection[str]) -> tuple[list[str], list[str]]:
    """The embedding and output layer that the `weights` of an adapter have, and those that they lack, by last parts. Of
    layers that share their weight, one is enough."""
    found: tuple[list[str], list[str]] = [], []
    for names in _embedding_layers(model):
        is_saved = any(key in weights for key in _keys(names))
        found[not is_saved].extend(name.rpartition(".")[2] for name in names)
    return found


def check_saves_resized(model: PeftModel, size: int, key: str) -> None:
    """Warn if PEFT will save the embeddings with the adapter, and raise ModelError if it will save one layer only.
    `size`: their rows in the base model, from which they were resized. If LoRA adapts one of two layers, PEFT saves
    this one only, and the new rows of the other one, which are random, would be lost."""
    rows = _rows(unwrap_adapter(model))
    if rows == size:
        return
    with warnings.catch_warnings(action="ignore"):  # which are repeated when the adapter is saved
        present, missing = saved_layers(unwrap_adapter(model), peft.get_peft_model_state_dict(model))
    what = f"the embeddings were resized from {size} to {rows} rows for the tokenizer"
    if present and not missing:
        warn(
            f"{key}: {what}, so that the adapter is saved with them and fits only a base model with {rows} rows. The "
            "commands of ebft resize it. Before using the adapter elsewhere, merge it: ebft merge-lora."
        )
    if missing and (rows > size or present):  # otherwise, they are the first rows of the base model
        names = " and ".join(missing)
        raise ModelError(
            f"{key}: {what}, but PEFT would not save new rows of {names} with the adapter. Add {names} to "
            "lora_modules_to_save (a new adapter, without lora_model_dir), or remove the keys that change the "
            "vocabulary (tokens, special_tokens, resize_token_embeddings_to_32x, shrink_embeddings)."
        )


def _fit_to_adapter(model: PreTrainedModel, path: Path, stored: Mapping[str, Tensor], tokens: int | None) -> None:
    """Resize the embeddings to the ones `stored` with an adapter, if those have all layers and enough rows."""
    rows = saved_rows(model, stored)
    if rows is None:
        return
    own = _rows(model)
    least = own if tokens is None else tokens
    if rows < least:
        raise ModelError(f"{path} has embeddings of {rows} rows, but the tokenizer needs {least}")
    present, missing = saved_layers(model, stored)
    name = model.config.name_or_path  # the vocabulary of a GGUF file is not resized
    own_size = lambda: type(model.config).from_pretrained(name).get_text_config().vocab_size
    if missing and rows != (own if is_gguf(name) else own_size()):
        raise ModelError(not_whole(path, rows, present, missing))
    if rows != own:
        model.resize_token_embeddings(rows, mean_resizing=False)


def not_whole(adapter: Path | str, rows: int, present: list[str], missing: list[str]) -> str:
    """The message for an adapter that was saved without one of the layers that were resized."""
    return (
        f"{adapter} was trained with embeddings that were resized to {rows} rows, but has only the rows of "
        f"{' and '.join(present)}: the new rows of {' and '.join(missing)} were not saved. Train again with "
        f"{' and '.join(missing)} in lora_target_modules or lora_modules_to_save"
    )


def _embedding_layers(model: PreTrainedModel) -> list[list[str]]:
    """The names of the input embedding and the output layer, if there is one; tied ones together."""
    names = {id(module): name for name, module in model.named_modules()}
    layers = [layer for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer is not None]
    found: dict[int, list[str]] = {}
    for layer in layers:
        found.setdefault(id(_inner(layer).weight), []).append(names[id(layer)])
    return list(found.values())


def _rows(model: PreTrainedModel) -> int:
    return _inner(model.get_input_embeddings()).num_embeddings  # the weight itself may be partitioned


def _inner(layer: nn.Module) -> nn.Module:
    """The layer without what PEFT puts around it."""
    while inner := layer._modules.get("base_layer") or layer._modules.get("original_module"):
        layer = inner
    return layer


def _keys(names: list[str]) -> list[str]:
    return [f"base_model.model.{name}{ending}" for name in names for ending in _SAVED_AS]
