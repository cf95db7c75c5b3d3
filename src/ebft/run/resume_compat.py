"""What must be the same when a run is resumed, what may differ with a warning, and what is restored.

Every checkpoint contains the settings of its run and hashes of its inputs: models, tokenizer, user code, data files,
versions of packages. Optimizer state and adapter weights only fit the settings that they were saved with, so others are
an error. Settings of the optimizer that the checkpoint restores keep their values, with a warning if the config has
others. Each other difference is a warning; a key that is added to the schema is compared unless it is listed here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import TrainingArguments

from ebft import catalog, errors, files, methods, printed
from ebft.config.axolotl import CarriedOverKeys
from ebft.config.keys.models import PrecisionKeys
from ebft.config.keys.run import RATE_KEYS, CheckpointKeys, HardwareKeys, HubKeys, ReportingKeys
from ebft.config.section import Section, flat_settings
from ebft.config.user_functions import module_sources
from ebft.data.sources import source_files
from ebft.methods.base_config import EvaluationKeys, RayKeys
from ebft.methods.method import foreign_keys, selecting_keys
from ebft.run.checks import imported_names
from ebft.run.config.schema import RunConfig
from ebft.run.reporting import versions

_MODEL_KEYS = ("base_model", "gguf_file")
_ADAPTER_KEYS = (
    *("lora_r", "lora_alpha", "lora_rank_pattern", "lora_alpha_pattern", "lora_target_modules", "lora_target_linear"),
    *("lora_target_parameters", "lora_target_linear_modules"),
    *("lora_modules_to_save", "peft_use_dora", "peft_use_rslora", "peft_layers_to_transform", "peft_layers_pattern"),
)
# Settings that are restored with the state of the optimizer, and settings that are read from the config on resuming.
_RESTORED = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_args")
OF_OPTIMIZER = (
    *_RESTORED,
    *("lr_scheduler", "lr_scheduler_kwargs", "cosine_min_lr_ratio", "warmup_steps", "warmup_ratio", "max_grad_norm"),
)
# Keys that are compared by `check_same_run`, besides learning rates.
FIXED = (*methods.FLAGS, "rl", "ebft.mode", "adapter", "optimizer", "unfrozen_parameters", *_ADAPTER_KEYS)
_WITH_OWN_STATE = ("reduce_lr_on_plateau", "greedy")  # schedules whose settings are restored too, and fit no other one
_FROM_HERE = "It applies from here on, without effect on earlier steps."
_OF_ROWS = "Training continues after the same number of steps, so rows may be repeated or left out."
_OF_WEIGHTS = "The trained weights come from the checkpoint: an adapter was trained with the former weights."
_OF_EVALUATIONS = "Evaluations cannot be compared with earlier ones, and so neither can the best checkpoint."
# Reason -> keys, or sections, whose changes give no warning.
_NOT_COMPARED = {
    "their contents are compared": """
        base_model base_model_config tokenizer_config gguf_file revision_of_model lora_model_dir chat_template
        chat_template_jinja datasets test_datasets pretraining_dataset nemo_gym_datasets nemo_gym_dir""",
    "it has the value of chat_template_kwargs": "trl.chat_template_kwargs",
    "it is the length of the run": "max_steps num_epochs budget",
    "the rows per step are compared": "micro_batch_size gradient_accumulation_steps batch_size eval_batch_size",
    "the initial weights come from the checkpoint": "peft_init_lora_weights mean_resizing_embeddings",
    "it only affects files and logs": """
        log_rollouts ebft.log_completions ebft.grad_norms_every trl.log_completions trl.num_completions_to_print
        dataset_prepared_path trust_remote_code""",
    "it only affects evaluations": "eval_sample_packing",
    "it only affects speed, memory and processes": """
        dataset_num_proc dataloader_num_workers dataloader_prefetch_factor dataloader_pin_memory device_map max_memory
        experts_implementation bnb_config_kwargs.bnb_4bit_quant_storage chunked_cross_entropy liger_rope
        liger_rms_norm liger_glu_activation liger_layer_norm precompute_ref_log_probs ebft.feature_device
        ebft.shared_prefix ebft.rollout_tokens_per_pass ebft.single_pass ebft.merge_rollouts ebft.cuda_graphs
        trl.reward_num_workers trl.streaming_partial_batch trl.streaming_min_groups trl.skip_zero_advantage_batches""",
    "it only affects where servers run": """
        trl.vllm_mode trl.vllm_server_host trl.vllm_server_port trl.vllm_server_timeout trl.vllm_lora_sync
        trl.vllm_enable_sleep_mode trl.vllm_logp_diff_warn trl.vllm_logp_diff_stop trl.use_data_producer
        trl.use_liger_loss
        vllm.python vllm.env vllm.host vllm.port vllm.device vllm.tensor_parallel_size vllm.data_parallel_size
        vllm.gpu_memory_utilization vllm.enable_prefix_caching vllm.enforce_eager vllm.serve_module
        vllm.worker_extension_cls nemo_gym_auto_clone nemo_gym_auto_start nemo_gym_head_port nemo_gym_server_timeout
        nemo_gym_verify_timeout nemo_gym_run_timeout""",
}
# Reason -> groups of keys, apart from those in `_OF_METHODS`.
_GROUPS: dict[str, tuple[type[Section], ...]] = {
    "it only affects files, logs and trackers": (CheckpointKeys, HubKeys, ReportingKeys),
    "it only affects evaluations": (EvaluationKeys,),
    "it only affects speed, memory and processes": (RayKeys, HardwareKeys),
    "it has no effect": (CarriedOverKeys,),
}
_OF_METHODS = {"plugins", "plugin_args", "metric_for_best_model", "greater_is_better", *PrecisionKeys.model_fields}
NOT_COMPARED: dict[str, str] = {
    **{key: reason for reason, keys in _NOT_COMPARED.items() for key in keys.split()},
    **{key: reason for reason, keys in _GROUPS.items() for group in keys for key in group.model_fields},
    **dict.fromkeys((*FIXED, *OF_OPTIMIZER, *RATE_KEYS), "a change is an error, or a warning of the optimizer"),
}
NOT_COMPARED = {key: reason for key, reason in NOT_COMPARED.items() if key not in _OF_METHODS}


def write_run_keys(config: RunConfig, folder: Path, others: dict[str, Any] | None = None) -> None:
    """Write the file of settings, with `others`, into the folder of a checkpoint or of the final model."""
    files.write_text(folder / files.RUN_FILE, json.dumps(run_keys(config) | (others or {}), indent=2) + "\n")


def saved_keys(folder: Path) -> dict[str, Any]:
    """The file of settings in a folder; empty if there is none."""
    return _read(folder / files.RUN_FILE) if (folder / files.RUN_FILE).is_file() else {}


def changed_values(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Key, former value and value of each key that both have and whose value differs."""
    return [(key, before[key], now[key]) for key in now if key in before and before[key] != now[key]]


def _optimizer_changes(config: RunConfig, saved: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    return changed_values(saved, {key: getattr(config, key) for key in OF_OPTIMIZER})


def optimizer_keys(config: RunConfig, checkpoint: Path | None) -> dict[str, Any]:
    """The settings of optimizer and schedule in effect; one warning if the config's differ from `checkpoint`'s."""
    now = {key: getattr(config, key) for key in OF_OPTIMIZER}
    changed = [] if checkpoint is None else _optimizer_changes(config, saved_keys(checkpoint))
    if not changed:
        return now
    restored = [*_RESTORED, "lr_scheduler_kwargs"] if config.lr_scheduler in _WITH_OWN_STATE else _RESTORED
    kept = {key: old for key, old, _ in changed if key in restored}
    facts = [
        f"{key}: {config_text(new)} has no effect, the run continues with {config_text(old)}"
        if key in kept
        else f"{key}: {config_text(new)} replaces {config_text(old)} from here on, without effect on earlier steps"
        for key, old, new in changed
    ]
    weights = "base_model" if config.adapter is None else "lora_model_dir"
    errors.warn(
        f"Optimizer settings differ from {checkpoint}, whose optimizer state is restored. {'; '.join(facts)}. "
        f"To train with all settings of the config, start a new run from the weights of the checkpoint: "
        f"{weights}={checkpoint}, with another output_dir and without resume_from_checkpoint."
    )
    return now | kept


def run_keys(config: RunConfig) -> dict[str, Any]:
    """The keys that must be the same on resuming, without keys that this run does not read."""
    keys = selecting_keys(config) | {key: getattr(config, key) for key in ("adapter", "optimizer", *_MODEL_KEYS)}
    keys |= config.model_dump(include=set(RATE_KEYS))  # the state of the optimizer fits the same groups only
    if config.adapter is None:
        return keys | {"unfrozen_parameters": _unordered(config.unfrozen_parameters)}
    if config.lora_model_dir is not None:  # its settings take precedence
        return _keys_in_files(Path(config.lora_model_dir).expanduser(), config) | keys
    return keys | {key: _unordered(getattr(config, key)) for key in _ADAPTER_KEYS}


def check_same_run(config: RunConfig, checkpoint: Path) -> None:
    """Raise ConfigError for each key that differs from the run that saved `checkpoint`; warn of the base model."""
    saved, now = _keys_in_files(checkpoint, config) | saved_keys(checkpoint), run_keys(config)
    changed = [key for key, *_ in changed_values(saved, now)]
    schedule, saved_schedule = config.lr_scheduler, saved.get("lr_scheduler", config.lr_scheduler)
    if schedule != saved_schedule and not {schedule, saved_schedule}.isdisjoint(_WITH_OWN_STATE):
        now["lr_scheduler"] = schedule
        changed.append("lr_scheduler")
    models = [key for key in _MODEL_KEYS if key in changed]
    changed = [key for key in changed if key not in models]
    if models and "inputs" not in saved:  # otherwise, the contents of the models are compared
        facts = " and ".join(
            f"{key}: {config_text(now[key])} differs from {key}: {config_text(saved[key])}" for key in models
        )
        errors.warn(
            f"{facts} of {checkpoint}. Resuming is only correct if both are the same model, as in a moved folder."
        )
    problems = [
        f"{key}: {config_text(now[key])} differs from {key}: {config_text(saved[key])} of {checkpoint}. Set it to "
        f"{config_text(saved[key])}, or start a new run in another output_dir."
        for key in changed
    ]
    if problems:
        raise errors.ConfigError("\n".join(problems))


def _keys_in_files(folder: Path, config: RunConfig) -> dict[str, Any]:
    """The keys that can be read from the files of a model or an adapter."""
    if (folder / files.ADAPTER_CONFIG).is_file():
        saved = _read(folder / files.ADAPTER_CONFIG)
        keys = {key: saved[name] for key, name in (("lora_r", "r"), ("lora_alpha", "lora_alpha")) if name in saved}
        return {"adapter": config.adapter or "lora", **keys}  # the same files for lora and qlora
    return {"adapter": None} if any(folder.glob("model*.safetensors")) else {}


def _read(path: Path) -> dict[str, Any]:
    with errors.doing(f"reading {path}"):
        return files.json_object(path)


def _unordered(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def config_text(value: Any) -> str:
    """A value as in a config; null for an unset one."""
    return value if isinstance(value, str) else json.dumps(value)


def compared_settings(config: RunConfig, uses_bf16: bool | None = None) -> dict[str, Any]:
    """The settings that determine what a run trains, by dotted key, as JSON without secrets; bf16 as in effect."""
    idle = foreign_keys(config) | ({"vllm"} if not config.uses_server else set())
    idle |= set() if config.method.rows == "prompts" else {"trl"} if config.method.samples_blocks else {"trl", "ebft"}
    idle |= NOT_COMPARED.keys()
    settings = {
        key: value for key, value in flat_settings(config) if key not in idle and key.partition(".")[0] not in idle
    }
    if "trl.reward_funcs" in settings:  # folders of reward models may be moved
        names = [name if model_folder(name) is None else Path(name).name for name in config.trl.reward_funcs or []]
        settings["trl.reward_funcs"] = names or None
    settings["bf16"] = uses_bf16
    if uses_bf16 is None:
        del settings["bf16"]
    return json.loads(json.dumps(printed.without_secrets(settings), default=str))


def run_record(
    config: RunConfig, tokenizer: Any, args: TrainingArguments, data_hashes: Sequence[str | None]
) -> dict[str, Any]:
    """What a checkpoint contains about its run, as JSON. `data_hashes`: of `datasets`."""
    return {
        "settings": compared_settings(config, args.bf16),
        "batch": [args.world_size, args.train_batch_size, args.gradient_accumulation_steps],
        "names": {"chat_template": config.chat_template, "base_model": config.model_name},
        "inputs": json.loads(json.dumps(_inputs(config, tokenizer, data_hashes), default=str)),
    }


def _inputs(config: RunConfig, tokenizer: Any, data_hashes: Sequence[str | None]) -> dict[str, dict[str, Any]]:
    base = model_folder(config.base_model, config.revision_of_model)
    settings = base if config.base_model_config is None else model_folder(config.base_model_config)
    texts = base if config.tokenizer_config is None else model_folder(config.tokenizer_config)
    found: dict[str, dict[str, Any]] = {"base_model": {}, "code": {}, "packages": dict(versions())}
    if base is not None:
        found["base_model"]["weights"] = files.weights_hash(base, config.gguf_file)
        for path in sorted(base.glob("*.py")) if config.trust_remote_code else []:
            found["base_model"][path.name] = files.sample_hash(path)
    found["config.json"] = {} if settings is None else files.settings_of(settings, "config.json")
    found["tokenizer"] = {} if texts is None else files.tokenizer_hashes(texts)
    found["chat_template"] = {"text": files.json_hash(tokenizer.chat_template)}
    rewards = (config.trl.reward_funcs or []) if config.method.rows == "prompts" else []
    folders = {str(place): model_folder(name) for place, name in enumerate(rewards)}
    found["trl.reward_funcs"] = {
        place: files.json_hash([files.weights_hash(folder), files.tokenizer_hashes(folder)])
        for place, folder in folders.items()
        if folder is not None
    }
    types = {entry.type for entry in (*config.datasets, *config.test_datasets)}  # their rows are compared
    functions = [name for name in imported_names(config) if name not in types]
    sources = module_sources(name.rpartition(".")[0] for name in functions)
    found["code"] = {name: files.json_hash(source) for name, source in sources.items()}
    given = [*data_hashes, *[None] * (len(config.datasets) - len(data_hashes))]
    found["datasets"] = {str(n): _of_data(entry, given[n]) for n, entry in enumerate(config.datasets)}
    found["test_datasets"] = {str(n): _of_data(entry, None) for n, entry in enumerate(config.test_datasets)}
    if not config.uses_server:
        found["packages"].pop("vllm", None)
    return found


def _of_data(entry: Any, known_hash: str | None) -> str:
    """The contents of the files of a dataset entry, or else its name and revision."""
    try:
        paths = source_files(entry) if known_hash is None else []
        if paths is not None:
            return known_hash or files.json_hash([files.sample_hash(path) for _, path in paths])
    except (errors.DataError, OSError):
        pass
    return files.json_hash([printed.without_secrets(entry.path), entry.name, entry.revision])


def warn_of_changes(config: RunConfig, now: Mapping[str, Any], folder: Path | None, is_finished: bool) -> None:
    """Warn of each setting and input in `now`, a `run_record`, that differs in `folder`; None for a new run."""
    if folder is None:
        return
    saved = saved_keys(folder)
    if "settings" in saved:
        changes = list(_changes(config, saved, now))
        if is_finished:
            for key, old, new in _optimizer_changes(config, saved):
                changes.append((f"{key}: {config_text(new)} instead of {config_text(old)}", ""))
        for what, effect in changes:
            errors.warn(
                f"No effect: {what}. The run of {folder} is complete."
                if is_finished
                else f"Resumed with {what} ({folder}). {effect}"
            )


def has_other_settings(config: RunConfig, folder: Path) -> bool:
    """Whether a run that resumes from `folder` would train with other settings, or be refused for this reason."""
    saved = saved_keys(folder)
    settings = run_keys(config) | compared_settings(config)
    before = {key: value for key, value in (saved | saved.get("settings", {})).items() if key not in _MODEL_KEYS}
    return bool(changed_values(before, settings) or _optimizer_changes(config, saved))


def _changes(config: RunConfig, saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each change in words, and its effect on the run."""
    for key, old, new in changed_values(saved["settings"], now["settings"]):
        yield f"{key}: {_short(new)} instead of {_short(old)}", _FROM_HERE
    batch, former = now["batch"], saved.get("batch", now["batch"])
    if math.prod(batch) != math.prod(former):
        processes, per_process, accumulated = batch
        yield (
            f"{math.prod(batch)} rows per step instead of {math.prod(former)} ({processes} processes instead of "
            f"{former[0]}, micro_batch_size: {per_process}, gradient_accumulation_steps: {accumulated})",
            _OF_ROWS,
        )
    before, inputs, names = saved["inputs"], now["inputs"], saved["names"]
    differ = {name: changed_values(before.get(name, {}), parts) for name, parts in inputs.items()}
    changed = {name: ", ".join(key for key, *_ in found) for name, found in differ.items()}
    if changed["base_model"]:
        yield f"other weights of base_model: {config.model_name}", _OF_WEIGHTS
    elif not before["base_model"].get("weights") and names["base_model"] != now["names"]["base_model"]:
        yield f"base_model: {config.model_name} instead of {names['base_model']}", _OF_WEIGHTS
    for key in dict.fromkeys((*inputs["config.json"], *before["config.json"])):
        old, new = before["config.json"].get(key), inputs["config.json"].get(key)
        if old != new:
            yield f"config.json: {key}: {_short(new)} instead of {_short(old)}", _FROM_HERE
    if changed["chat_template"]:
        yield f"chat_template: another text of {_short(now['names']['chat_template'])}", _FROM_HERE
    for name, what in (("tokenizer", "contents of the tokenizer's files:"), ("code", "code in")):
        if changed[name]:
            yield f"other {what} {changed[name]}", _FROM_HERE
    for place, *_ in differ["trl.reward_funcs"]:
        yield f"another model in the folder of trl.reward_funcs: {config.trl.reward_funcs[int(place)]}", _FROM_HERE
    for key, effect in (("datasets", _OF_ROWS), ("test_datasets", _OF_EVALUATIONS)):
        for place, *_ in differ[key]:
            yield f"other contents of {key}: {printed.without_secrets(getattr(config, key)[int(place)].path)}", effect
    if differ["packages"]:
        facts = ", ".join(f"{name} {new} instead of {old}" for name, old, new in differ["packages"])
        yield f"other versions of packages: {facts}", "Numbers may differ."


def _short(value: Any) -> str:
    return errors.shortened(config_text(value), 200)


def model_folder(name: str, revision: str | None = None) -> Path | None:
    """The folder of the model `name`; for a Hub id, its folder in the cache. None if there is none."""
    folder = Path(catalog.lasting_name(name))
    if folder.is_dir():
        return folder
    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # not a Hub id
        return None
    return Path(found).parent if isinstance(found, str) else None
