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
        return model
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
    settings = lora_config(model, config)
    try:
        return get_peft_model(model, settings)
    except ValueError as error:  # for example a module that PEFT cannot adapt, such as a norm
        raise ModelError(
            f"PEFT cannot adapt lora_target_modules: {config.lora_target_modules!r} with lora_modules_to_save: "
            f"{config.lora_modules_to_save!r}: {error} The linear layers are {', '.join(linear_names(model))}."
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
        exclude_modules=heads or None,
        modules_to_save=[*(config.lora_modules_to_save or []), *heads] or None,
    )


def linear_names(model: PreTrainedModel) -> list[str]:
    """Last parts of the names of all linear layers, such as q_proj and down_proj, sorted."""
    return sorted(
        {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    )


def _targets(model: PreTrainedModel, config: ModelSettings) -> str | list[str]:
    wanted = config.lora_target_modules
    if wanted is None:
        return "all-linear"
    names = [name for name, _ in model.named_modules()]
    for given in [wanted] if isinstance(wanted, str) else wanted:
        # PEFT treats a string as one regular expression, and the elements of a list as suffixes of names.
        pattern = given if isinstance(wanted, str) else rf"(.*\.)?{re.escape(given)}"
        if not any(_full_match(pattern, name) for name in names):
            raise ModelError(
                f"lora_target_modules: {given!r} matches no module. The linear layers are "
                f"{', '.join(linear_names(model))}; choose from them, or set lora_target_linear: true."
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
