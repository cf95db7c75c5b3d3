"""LoRA adapters with PEFT: a new one, or a saved one to continue training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import PreTrainedModel

from ebft.errors import ConfigError, ModelError
from ebft.models.heads import head_modules, task_type
from ebft.models.saved_adapter import SETTINGS, load_saved_adapter
from ebft.models.unfrozen import freeze_except
from ebft.over_transformers import Conv1D

if TYPE_CHECKING:
    from ebft.models.keys import ModelSettings


def attach_adapter(
    model: PreTrainedModel, config: ModelSettings, gradient_checkpointing: bool = False
) -> PreTrainedModel | PeftModel:
    """`model` with the adapter of the config, or `model` itself if the config has none.

    Adapter weights are always float32. `lora_model_dir` continues training a saved adapter, whose settings take
    precedence. Raises ModelError if `lora_target_modules` or `lora_modules_to_save` match no module of the model or one
    that cannot be adapted, or if the model already has an adapter.
    """
    if config.adapter is None:
        return freeze_except(model, config.unfrozen_parameters, gradient_checkpointing)
    if isinstance(model, PeftModel):
        raise ModelError("The model already has an adapter. Attach one to the base model (load_base_model) only.")
    if config.load_in_4bit or config.load_in_8bit:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if gradient_checkpointing:
        # Frozen embeddings give activations without gradient, and reentrant checkpoints then drop the whole segment.
        model.enable_input_require_grads()
    if config.lora_model_dir is not None:
        return _saved_adapter(model, config.lora_model_dir)
    _check_saved_modules(model, config.lora_modules_to_save)
    settings, names = lora_config(model, config), linear_names(model)
    try:
        return get_peft_model(model, settings)
    except ValueError as error:  # for example a module that PEFT cannot adapt, such as a norm
        if config.lora_target_linear and config.lora_target_parameters is None and "ParamWrapper" in str(error):
            raise ModelError(
                f"lora_target_linear: true also selects the fused experts of this model, but PEFT cannot adapt them "
                f"with these settings ({error}). Remove the setting, or list modules in lora_target_modules: "
                f"{', '.join(names)}."
            ) from error
        raise ModelError(
            f"PEFT cannot adapt lora_target_modules: {config.lora_target_modules!r} with lora_modules_to_save: "
            f"{config.lora_modules_to_save!r}: {error} The linear layers are {', '.join(names)}."
        ) from error


def lora_config(model: PreTrainedModel, config: ModelSettings) -> LoraConfig:
    """The PEFT config for the `lora_` keys; the head of a classifier is trained fully."""
    heads = head_modules(model)
    return LoraConfig(
        task_type=task_type(model),
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=_targets(model, config),
        target_parameters=_target_parameters(model, config.lora_target_parameters),
        use_dora=config.peft_use_dora,
        use_rslora=config.peft_use_rslora,
        layers_to_transform=_layers(model, config.peft_layers_to_transform),
        layers_pattern=config.peft_layers_pattern,
        init_lora_weights=config.peft_init_lora_weights,
        exclude_modules=heads or None,
        modules_to_save=[*(config.lora_modules_to_save or []), *heads] or None,
    )


def linear_names(model: PreTrainedModel) -> list[str]:
    """Last parts of the names of all linear layers, such as q_proj and down_proj, sorted."""
    kinds = (torch.nn.Linear, Conv1D)
    return sorted({name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, kinds)})


def _targets(model: PreTrainedModel, config: ModelSettings) -> str | list[str]:
    wanted = config.lora_target_modules
    if config.lora_target_linear and isinstance(wanted, list):
        return _all_linear_and(model, config, wanted)
    if wanted is None and not config.lora_target_linear:
        return []  # lora_target_parameters alone; with None, PEFT would choose modules by the model's type
    if wanted is None and config.peft_layers_to_transform is not None:
        return _all_linear(model)  # PEFT restricts lists to some layers, but not its name for all linear layers
    if wanted is None:
        return "all-linear"
    for given in [wanted] if isinstance(wanted, str) else wanted:
        _matching(model, given, is_expression=isinstance(wanted, str))
    return wanted


def _matching(model: PreTrainedModel, given: str, is_expression: bool) -> list[str]:
    """The names of the modules that an element of `lora_target_modules` selects. Raises ModelError if none are."""
    # PEFT treats a string as one regular expression, and the elements of a list as suffixes of names.
    pattern = given if is_expression else rf"(.*\.)?{re.escape(given)}"
    found = [name for name, _ in model.named_modules() if _full_match(pattern, name)]
    if not found:
        raise ModelError(
            f"lora_target_modules: {given!r} matches no module. The linear layers are "
            f"{', '.join(linear_names(model))}; choose from them, or set lora_target_linear: true."
        )
    return found


def _all_linear_and(model: PreTrainedModel, config: ModelSettings, wanted: list[str]) -> str | list[str]:
    """All linear layers and the modules `wanted`."""
    linear = _all_linear(model)
    others = [
        given
        for given in wanted
        if any(name.rpartition(".")[2] not in linear for name in _matching(model, given, is_expression=False))
    ]
    if others and any(parameter.dim() == 3 for parameter in model.parameters()):
        raise ModelError(
            f"lora_target_modules: {others[0]!r} is not a linear layer that lora_target_linear: true selects, and the "
            "setting also selects the fused experts of this model. Remove the setting, and list all modules in "
            "lora_target_modules and the experts in lora_target_parameters."
        )
    if others:
        return [*linear, *others]
    return linear if config.peft_layers_to_transform is not None else "all-linear"


def _all_linear(model: PreTrainedModel) -> list[str]:
    """The last parts of the names of all linear layers except the output layer."""
    output = model.get_output_embeddings()
    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, (torch.nn.Linear, Conv1D)) and module is not output
        }
    )


def _target_parameters(model: PreTrainedModel, wanted: list[str] | None) -> list[str] | None:
    """The suffixes of `lora_target_parameters`. PEFT only warns of one that matches nothing."""
    linear = {
        f"{name}.weight" for name, module in model.named_modules() if isinstance(module, (torch.nn.Linear, Conv1D))
    }
    names = {name: parameter.dim() for name, parameter in model.named_parameters() if name not in linear}
    for given in wanted or []:
        matching = [dims for name, dims in names.items() if name == given or name.endswith(f".{given}")]
        if not matching or not {*matching} <= {2, 3}:
            experts = sorted({".".join(name.split(".")[-2:]) for name, dims in names.items() if dims == 3})
            known = f"Those of experts are {', '.join(experts)}" if experts else "The model has no fused experts"
            problem = "matches no parameter outside of linear layers" if not matching else "matches a vector"
            raise ModelError(
                f"lora_target_parameters: {given!r} {problem}. {known}; adapt linear layers with lora_target_modules."
            )
    return wanted


def _layers(model: PreTrainedModel, wanted: int | list[int] | None) -> int | list[int] | None:
    """The indices of `peft_layers_to_transform`. PEFT silently skips those that the model does not have."""
    depth = model.config.get_text_config().num_hidden_layers
    missing = [index for index in ([wanted] if isinstance(wanted, int) else wanted or []) if index >= depth]
    if missing:
        raise ModelError(
            f"peft_layers_to_transform: {missing[0]} is not a layer of the model, whose {depth} layers have the "
            f"indices 0 to {depth - 1}."
        )
    return wanted


def _check_saved_modules(model: PreTrainedModel, wanted: list[str] | None) -> None:
    """PEFT treats the elements as suffixes of names, and silently skips one that matches nothing."""
    names = [name for name, _ in model.named_modules()]
    for given in wanted or []:
        if not any(name.endswith(given) for name in names):
            known = sorted({name.rpartition(".")[2] for name in names} - {""})
            raise ModelError(
                f"lora_modules_to_save: {given!r} matches no module. The modules are "
                f"{', '.join(part for part in known if not part.isdecimal())}."
            )


def _full_match(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise ConfigError(f"lora_target_modules: {pattern!r} is not a valid regular expression: {error}.") from error


def _saved_adapter(model: PreTrainedModel, folder: str) -> PeftModel:
    if not (Path(folder).expanduser() / SETTINGS).is_file():
        raise ModelError(
            f"lora_model_dir: {folder!r} does not contain an adapter (no {SETTINGS}). Give the folder of a saved "
            "adapter, such as a checkpoint folder."
        )
    try:
        return load_saved_adapter(model, folder, is_trainable=True)
    except ModelError as error:
        raise ModelError(f"lora_model_dir: {error}") from error
