"""What a resumed run continues with that differs from the run that saved its checkpoint: one warning for each.

Every checkpoint contains the settings of its run and short descriptions of its inputs: models, tokenizer, user code,
data files, versions of packages. A key that is added to the schema is compared unless it is listed here.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from ebft.config.axolotl import CarriedOverKeys
from ebft.config.schema import RunConfig
from ebft.config.section import Section
from ebft.config.tool_keys import EvaluationKeys, RayKeys
from ebft.data.sources import source_files
from ebft.errors import DataError, shortened
from ebft.methods import foreign_keys
from ebft.models.files import (
    file_sample,
    model_folder,
    settings_of,
    tokenizer_fingerprints,
    weights_fingerprint,
)
from ebft.models.keys import PrecisionKeys
from ebft.prepared.key import flat_settings, module_sources
from ebft.run.checks import imported_names
from ebft.run.keys import RATE_KEYS, CheckpointKeys, HardwareKeys, HubKeys, ReportingKeys
from ebft.run.reporting import versions
from ebft.run.same_run import FIXED, OF_OPTIMIZER, optimizer_changes, run_keys, saved_keys, text_of
from ebft.secrets import without_secrets

_WORDS = 200  # characters of a value in a warning
_FROM_HERE = "It applies from here on, without effect on earlier steps."
_OF_ROWS = "Training continues at the same position in the new data, so rows may be repeated or left out."
_OF_EVALUATIONS = "Evaluations cannot be compared with those before, of which the best checkpoint is one."
# Reason -> keys, or sections, whose changes give no warning here.
_KEYS = {
    "their contents are compared": """
        base_model base_model_config tokenizer_config gguf_file revision_of_model lora_model_dir chat_template
        chat_template_jinja datasets test_datasets pretraining_dataset nemo_gym_datasets nemo_gym_dir""",
    "it has the value of chat_template_kwargs": "trl.chat_template_kwargs",
    "it is the length of the run": "max_steps num_epochs budget",
    "batches may change": "micro_batch_size gradient_accumulation_steps batch_size eval_batch_size",
    "the initial weights are those of the checkpoint": "peft_init_lora_weights mean_resizing_embeddings",
    "it only affects files and logs": """
        ebft.log_completions ebft.grad_norms_every trl.log_completions trl.num_completions_to_print
        dataset_prepared_path trust_remote_code""",
    "it only affects evaluations": "eval_sample_packing",
    "it only affects speed, memory and processes": """
        dataset_num_proc dataloader_num_workers dataloader_prefetch_factor dataloader_pin_memory device_map
        experts_implementation bnb_config_kwargs chunked_cross_entropy liger_rope liger_rms_norm liger_glu_activation
        liger_layer_norm precompute_ref_log_probs ebft.feature_device ebft.shared_prefix ebft.rollout_tokens_per_pass
        ebft.single_pass ebft.merge_rollouts trl.reward_num_workers trl.streaming_partial_batch
        trl.streaming_min_groups trl.skip_zero_advantage_batches""",
    "it only affects where servers run": """
        trl.vllm_mode trl.vllm_server_host trl.vllm_server_port trl.vllm_server_timeout trl.vllm_lora_sync
        trl.vllm_enable_sleep_mode trl.vllm_logp_diff_warn trl.vllm_logp_diff_stop trl.use_data_producer
        vllm.python vllm.env vllm.host vllm.port vllm.device vllm.tensor_parallel_size vllm.data_parallel_size
        vllm.gpu_memory_utilization vllm.enable_prefix_caching vllm.enforce_eager vllm.serve_module
        vllm.worker_extension_cls nemo_gym_auto_clone nemo_gym_auto_start nemo_gym_head_port nemo_gym_server_timeout
        nemo_gym_verify_timeout""",
}
# Reason -> groups of keys, apart from those in `_OF_METHODS`.
_GROUPS: dict[str, tuple[type[Section], ...]] = {
    "it only affects files, logs and trackers": (CheckpointKeys, HubKeys, ReportingKeys),
    "it only affects evaluations": (EvaluationKeys,),
    "it only affects speed, memory and processes": (RayKeys, HardwareKeys),
    "it has no effect": (CarriedOverKeys,),
}
_OF_METHODS = {"plugins", "metric_for_best_model", "greater_is_better", *PrecisionKeys.model_fields}
NOT_COMPARED: dict[str, str] = {
    **{key: reason for reason, keys in _KEYS.items() for key in keys.split()},
    **{key: reason for reason, keys in _GROUPS.items() for group in keys for key in group.model_fields},
    **dict.fromkeys((*FIXED, *OF_OPTIMIZER, *RATE_KEYS), "a change is an error, or a warning of the optimizer"),
}
NOT_COMPARED = {key: reason for key, reason in NOT_COMPARED.items() if key not in _OF_METHODS}


def compared_settings(config: RunConfig, uses_bf16: bool | None = None) -> dict[str, Any]:
    """The settings of a run that determine what it trains, by dotted key, as JSON values without secrets.

    Keys that the method does not read are left out. `uses_bf16`: the value of bf16 in effect; None leaves it out.
    """
    idle = foreign_keys(config) | ({"vllm"} if not config.uses_server else set())
    idle |= set() if config.method.rows == "prompts" else {"trl"} if config.method.samples_blocks else {"trl", "ebft"}
    idle |= NOT_COMPARED.keys()
    settings = {
        key: value for key, value in flat_settings(config) if key not in idle and key.partition(".")[0] not in idle
    }
    if "trl.reward_funcs" in settings:  # folders of reward models may be moved
        names = [name if model_folder(name) is None else Path(name).name for name in config.trl.reward_funcs or []]
        settings["trl.reward_funcs"] = names or None
    settings |= {"bf16": uses_bf16}
    if uses_bf16 is None:
        del settings["bf16"]
    return json.loads(json.dumps(without_secrets(settings), default=str))


def run_record(config: RunConfig, tokenizer: Any, uses_bf16: bool, digests: Sequence[str | None]) -> dict[str, Any]:
    """What a checkpoint contains about its run, as JSON. `digests`: those of `datasets`, as `data_digests` has them."""
    return {
        "settings": compared_settings(config, uses_bf16),
        "names": {"chat_template": config.chat_template, "base_model": config.model_name},
        "inputs": json.loads(json.dumps(_inputs(config, tokenizer, digests), default=str)),
    }


def _inputs(config: RunConfig, tokenizer: Any, digests: Sequence[str | None]) -> dict[str, dict[str, Any]]:
    base = model_folder(config.base_model, config.revision_of_model)
    settings = base if config.base_model_config is None else model_folder(config.base_model_config)
    texts = base if config.tokenizer_config is None else model_folder(config.tokenizer_config)
    found: dict[str, dict[str, Any]] = {"base_model": {}, "code": {}, "packages": dict(versions())}
    if base is not None:
        found["base_model"]["weights"] = weights_fingerprint(base, config.gguf_file)
        for path in sorted(base.glob("*.py")) if config.trust_remote_code else []:
            found["base_model"][path.name] = file_sample(path)
    found["config.json"] = {} if settings is None else settings_of(settings, "config.json")
    found["tokenizer"] = {} if texts is None else tokenizer_fingerprints(texts)
    found["chat_template"] = {"text": _hash(tokenizer.chat_template)}
    rewards = (config.trl.reward_funcs or []) if config.method.rows == "prompts" else []
    folders = {str(place): model_folder(name) for place, name in enumerate(rewards)}
    found["trl.reward_funcs"] = {
        place: _hash([weights_fingerprint(folder), tokenizer_fingerprints(folder)])
        for place, folder in folders.items()
        if folder is not None
    }
    types = {entry.type for entry in (*config.datasets, *config.test_datasets)}  # their rows are compared
    functions = [name for name in imported_names(config) if name not in types]
    sources = module_sources(name.rpartition(".")[0] for name in functions)
    found["code"] = {name: _hash(source) for name, source in sources.items()}
    given = [*digests, *[None] * (len(config.datasets) - len(digests))]
    found["datasets"] = {str(n): _of_data(entry, given[n]) for n, entry in enumerate(config.datasets)}
    found["test_datasets"] = {str(n): _of_data(entry, None) for n, entry in enumerate(config.test_datasets)}
    if not config.uses_server:
        found["packages"].pop("vllm", None)
    return found


def _of_data(entry: Any, digest: str | None) -> str:
    """The contents of the files of a dataset entry, or else its name and revision."""
    try:
        files = source_files(entry) if digest is None else []
        if files is not None:
            return digest or _hash([file_sample(path) for _, path in files])
    except (DataError, OSError):
        pass
    return _hash([without_secrets(entry.path), entry.name, entry.revision])


def warn_of_changes(config: RunConfig, now: Mapping[str, Any], folder: Path, is_finished: bool) -> None:
    """One warning for each setting and input in `now`, a `run_record`, that differs from that of the run in `folder`.

    `is_finished`: whether nothing is trained, so that changes have no effect.
    """
    saved = saved_keys(folder)
    if "settings" in saved:
        changes = list(_changes(config, saved, now))
        if is_finished:
            of_optimizer = optimizer_changes(config, saved)
            changes += [(f"{key}: {text_of(new)} instead of {text_of(old)}", "") for key, old, new in of_optimizer]
        for what, effect in changes:
            warnings.warn(
                f"No effect: {what}. The run of {folder} is complete."
                if is_finished
                else f"Resumed with {what} ({folder}). {effect}",
                stacklevel=2,
            )
    elif not is_finished:
        warnings.warn(
            f"{folder} does not contain the settings and inputs of its run, as checkpoints of earlier releases and of "
            "other programs. Changes of the method's settings, the base model and other inputs are not noticed.",
            stacklevel=2,
        )


def has_other_settings(config: RunConfig, folder: Path) -> bool:
    """Whether a run that resumes from `folder` would train with other settings, or be refused because of them."""
    saved = saved_keys(folder)
    settings = run_keys(config) | compared_settings(config)
    models = ("base_model", "gguf_file")
    before = {key: value for key, value in (saved | saved.get("settings", {})).items() if key not in models}
    return any(changed_values(before, settings)) or bool(optimizer_changes(config, saved))


def changed_values(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Key, former value and value of each key that both have and whose value differs."""
    yield from ((key, before[key], now[key]) for key in now if key in before and before[key] != now[key])


def _changes(config: RunConfig, saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each change in words, and its effect on the run."""
    for key, old, new in changed_values(saved["settings"], now["settings"]):
        yield f"{key}: {_short(new)} instead of {_short(old)}", _FROM_HERE
    before, inputs, names = saved["inputs"], now["inputs"], saved["names"]
    differ = {name: list(changed_values(before.get(name, {}), parts)) for name, parts in inputs.items()}
    changed = {name: ", ".join(key for key, *_ in found) for name, found in differ.items()}
    if changed["base_model"]:
        yield f"other weights of base_model: {config.model_name}", _effect_of_weights(config)
    elif not before["base_model"].get("weights") and names["base_model"] != now["names"]["base_model"]:
        yield f"base_model: {config.model_name} instead of {names['base_model']}", _effect_of_weights(config)
    for key in dict.fromkeys((*inputs["config.json"], *before["config.json"])):
        old, new = before["config.json"].get(key), inputs["config.json"].get(key)
        if old != new:
            yield f"config.json: {key}: {_short(new)} instead of {_short(old)}", _FROM_HERE
    if changed["tokenizer"]:
        yield f"other contents of the tokenizer's files: {changed['tokenizer']}", _FROM_HERE
    if changed["chat_template"]:
        old, new = names["chat_template"], now["names"]["chat_template"]
        words = f": {_short(new)} instead of {_short(old)}" if old != new else f": another text of {_short(new)}"
        yield f"chat_template{words}", _FROM_HERE
    for place, *_ in differ["trl.reward_funcs"]:
        yield f"another model in the folder of trl.reward_funcs: {config.trl.reward_funcs[int(place)]}", _FROM_HERE
    if changed["code"]:
        yield f"other code in {changed['code']}", _FROM_HERE
    for key, effect in (("datasets", _OF_ROWS), ("test_datasets", _OF_EVALUATIONS)):
        for place, *_ in differ[key]:
            yield f"other contents of {key}: {without_secrets(getattr(config, key)[int(place)].path)}", effect
    versions_now = [f"{name} {new} instead of {old}" for name, old, new in differ["packages"]]
    if versions_now:
        yield f"other versions of packages: {', '.join(versions_now)}", "Numbers may differ."


def _effect_of_weights(config: RunConfig) -> str:
    if config.adapter is not None:
        return "The adapter of the checkpoint was trained with the former weights, and belongs to them."
    return (
        "All trained weights are those of the checkpoint. A feature network or a reference model, if the method has "
        "one, is the new model."
    )


def _short(value: Any) -> str:
    return shortened(text_of(value), _WORDS)


def _hash(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()
