"""The settings that must be the same when a run is resumed: saved in every checkpoint, and compared on resuming.

Optimizer state and adapter weights only fit the settings that they were saved with. Other settings, such as
max_steps and batch sizes, may change. Settings of the optimizer that the checkpoint restores keep their values, with a
warning if the config has others.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ebft.config.schema import RunConfig
from ebft.errors import ConfigError
from ebft.files import RUN_FILE, write_text
from ebft.methods import FLAGS
from ebft.methods.method import selecting_keys
from ebft.run.keys import RATE_KEYS

_MODEL_KEYS = ("base_model", "gguf_file")
_KEYS = ("adapter", "optimizer", *_MODEL_KEYS)
_ADAPTER_KEYS = (
    "lora_r",
    "lora_alpha",
    "lora_target_modules",
    "lora_target_linear",
    "lora_target_parameters",
    "lora_modules_to_save",
    "peft_use_dora",
    "peft_use_rslora",
    "peft_layers_to_transform",
    "peft_layers_pattern",
)
# Settings that are restored with the state of the optimizer, and those that are read from the config on resuming.
_RESTORED = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_args")
_READ_AGAIN = (
    "lr_scheduler",
    "lr_scheduler_kwargs",
    "cosine_min_lr_ratio",
    "warmup_steps",
    "warmup_ratio",
    "max_grad_norm",
)
OF_OPTIMIZER = (*_RESTORED, *_READ_AGAIN)
# Keys that are compared by `check_same_run`, besides those of learning rates.
FIXED = (*FLAGS, "rl", "ebft.mode", "adapter", "optimizer", "unfrozen_parameters", *_ADAPTER_KEYS)
_WITH_OWN_STATE = ("reduce_lr_on_plateau", "greedy")  # schedules whose settings are restored too, and fit no other one
_IN_ADAPTER_CONFIG = {"lora_r": "r", "lora_alpha": "lora_alpha"}


def write_run_keys(config: RunConfig, folder: Path, others: dict[str, Any] | None = None) -> None:
    """Write the file of settings into the folder of a checkpoint or of the final model.

    `others`: what else it contains: a `run_record`, and in checkpoints with optimizer state that of `optimizer_keys`.
    """
    write_text(folder / RUN_FILE, json.dumps(run_keys(config) | (others or {}), indent=2) + "\n")


def saved_keys(folder: Path) -> dict[str, Any]:
    """The file of settings in a folder; empty if there is none. Raises ConfigError if it cannot be read."""
    return _read(folder / RUN_FILE) if (folder / RUN_FILE).is_file() else {}


def optimizer_changes(config: RunConfig, saved: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Key, saved value and value of each setting of the optimizer and the schedule that differs."""
    now = {key: getattr(config, key) for key in OF_OPTIMIZER}
    return [(key, saved[key], now[key]) for key in now if key in saved and now[key] != saved[key]]


def optimizer_keys(config: RunConfig, checkpoint: Path | None) -> dict[str, Any]:
    """The settings of optimizer and schedule that are in effect, in a run that is resumed from `checkpoint` or new.

    Settings that differ from those of the checkpoint give one warning, which says which of them have an effect.
    """
    now = {key: getattr(config, key) for key in OF_OPTIMIZER}
    saved = {} if checkpoint is None else saved_keys(checkpoint)
    changed = [key for key, *_ in optimizer_changes(config, saved)]
    if not changed:
        return now
    restored = [*_RESTORED, "lr_scheduler_kwargs"] if config.lr_scheduler in _WITH_OWN_STATE else _RESTORED
    kept = {key: saved[key] for key in changed if key in restored}
    facts = [
        f"{key}: {text_of(now[key])} has no effect, the run continues with {text_of(saved[key])}"
        if key in kept
        else f"{key}: {text_of(now[key])} replaces {text_of(saved[key])} from here on, without effect on earlier steps"
        for key in changed
    ]
    weights = "base_model" if config.adapter is None else "lora_model_dir"
    warnings.warn(
        f"Optimizer settings differ from those of {checkpoint}, whose optimizer state is restored. {'; '.join(facts)}. "
        f"To train with all settings of the config, start a new run from the weights of the checkpoint: "
        f"{weights}={checkpoint}, with another output_dir and without resume_from_checkpoint.",
        stacklevel=2,
    )
    return now | kept


def run_keys(config: RunConfig) -> dict[str, Any]:
    """The keys that must be the same on resuming, without those that this run does not read."""
    rates = config.model_dump(include=set(RATE_KEYS))  # the state of the optimizer fits the same groups only
    keys = selecting_keys(config) | {key: getattr(config, key) for key in _KEYS} | rates
    if config.adapter is None:
        return keys | {"unfrozen_parameters": _unordered(config.unfrozen_parameters)}
    if config.lora_model_dir is not None:  # its settings take precedence
        return _keys_in_files(Path(config.lora_model_dir).expanduser(), config) | keys
    return keys | {key: _unordered(getattr(config, key)) for key in _ADAPTER_KEYS}


def check_same_run(config: RunConfig, checkpoint: Path) -> None:
    """Raise ConfigError for each key that differs from the run that saved `checkpoint`; for the base model only warn.

    Checkpoints without the file of settings are checked by their weights and by the settings of their adapter.
    """
    saved, now = _keys_in_files(checkpoint, config) | saved_keys(checkpoint), run_keys(config)
    changed = [key for key in now if key in saved and now[key] != saved[key]]
    schedule, saved_schedule = config.lr_scheduler, saved.get("lr_scheduler", config.lr_scheduler)
    if schedule != saved_schedule and not {schedule, saved_schedule}.isdisjoint(_WITH_OWN_STATE):
        now["lr_scheduler"] = schedule
        changed.append("lr_scheduler")
    models = [key for key in _MODEL_KEYS if key in changed]
    changed = [key for key in changed if key not in models]
    if models and "inputs" not in saved:  # otherwise, the contents of the models are compared
        facts = " and ".join(f"{key}: {text_of(now[key])} differs from {key}: {text_of(saved[key])}" for key in models)
        warnings.warn(
            f"{facts} of {checkpoint}. Resuming is only correct if both are the same model, for example in a folder "
            "that was moved.",
            stacklevel=3,
        )
    problems = [
        f"{key}: {text_of(now[key])} differs from {key}: {text_of(saved[key])} of {checkpoint}. Set it to "
        f"{text_of(saved[key])}, or start a new run in another output_dir."
        for key in changed
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _keys_in_files(folder: Path, config: RunConfig) -> dict[str, Any]:
    """The keys that can be read from the files of a model or an adapter."""
    adapter_config = folder / "adapter_config.json"
    if adapter_config.is_file():
        saved = _read(adapter_config)
        keys = {key: saved[name] for key, name in _IN_ADAPTER_CONFIG.items() if name in saved}
        return {"adapter": config.adapter or "lora", **keys}  # the same files for lora and qlora
    return {"adapter": None} if any(folder.glob("model*.safetensors")) else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}). Resume from another checkpoint.") from error


def _unordered(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def text_of(value: Any) -> str:
    """A value as in a config; null for an unset one."""
    return value if isinstance(value, str) else json.dumps(value)
