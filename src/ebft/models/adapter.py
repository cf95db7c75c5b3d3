"""LoRA adapters with PEFT: a new one, or a saved one to continue training."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import PreTrainedModel

from ebft.errors import ModelError
from ebft.models.adapter_targets import adapted_routers, linear_names, target_modules, target_parameters
from ebft.models.heads import head_modules, task_type
from ebft.models.saved_adapter import SETTINGS, UNMATCHED_RANK, load_saved_adapter
from ebft.models.unfrozen import freeze_except

if TYPE_CHECKING:
    from ebft.models.keys import ModelSettings
# Keys of a config, and the settings of a saved adapter that are used instead of them.
_SAVED_SETTINGS = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "peft_use_dora": "use_dora",
    "peft_use_rslora": "use_rslora",
}


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
        return _saved_adapter(model, config)
    _check_saved_modules(model, config.lora_modules_to_save)
    settings, names = lora_config(model, config), linear_names(model)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=UNMATCHED_RANK)
            return get_peft_model(model, settings)
    except ValueError as error:  # for example a module that PEFT cannot adapt, such as a norm
        if config.lora_target_parameters is None and "ParamWrapper" in str(error):
            key = "lora_target_linear: true" if config.lora_target_linear else "lora_target_modules"
            raise ModelError(
                f"{key} also selects the fused experts of this model, but PEFT cannot adapt them with these settings "
                f"({error}). Remove the setting, or list other modules in lora_target_modules: {', '.join(names)}."
            ) from error
        raise ModelError(
            f"PEFT cannot adapt lora_target_modules: {config.lora_target_modules!r} with lora_modules_to_save: "
            f"{config.lora_modules_to_save!r}: {error} The linear layers are {', '.join(names)}."
        ) from error


def lora_config(model: PreTrainedModel, config: ModelSettings) -> LoraConfig:
    """The PEFT config for the `lora_` keys; the head of a classifier is trained fully."""
    heads = head_modules(model)
    excluded = [*heads, *(adapted_routers(model, config) if config.lora_target_linear else ())]
    return LoraConfig(
        task_type=task_type(model),
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=target_modules(model, config),
        target_parameters=target_parameters(model, config.lora_target_parameters),
        use_dora=config.peft_use_dora,
        use_rslora=config.peft_use_rslora,
        layers_to_transform=_layers(model, config.peft_layers_to_transform),
        layers_pattern=config.peft_layers_pattern,
        init_lora_weights=config.peft_init_lora_weights,
        exclude_modules=excluded or None,
        modules_to_save=[*(config.lora_modules_to_save or []), *heads] or None,
    )


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


def _saved_adapter(model: PreTrainedModel, config: ModelSettings) -> PeftModel:
    folder = str(config.lora_model_dir)
    if not (Path(folder).expanduser() / SETTINGS).is_file():
        raise ModelError(
            f"lora_model_dir: {folder!r} does not contain an adapter (no {SETTINGS}). Give the folder of a saved "
            "adapter, such as a checkpoint folder."
        )
    try:
        loaded = load_saved_adapter(model, folder, is_trainable=True)
    except ModelError as error:
        raise ModelError(f"lora_model_dir: {error}") from error
    for key, name in _SAVED_SETTINGS.items():
        wanted, found = getattr(config, key), getattr(loaded.active_peft_config, name, None)  # absent: not LoRA
        wanted, found = (set(value) if isinstance(value, list | set) else value for value in (wanted, found))
        if key in config.model_fields_set and wanted is not None and wanted != found:
            own = sorted(found) if isinstance(found, set) else found
            warnings.warn(
                f"{key}: {getattr(config, key)!r} has no effect: the adapter in lora_model_dir has {own!r}. Remove it, "
                "or remove lora_model_dir to train a new adapter.",
                stacklevel=3,
            )
    return loaded
