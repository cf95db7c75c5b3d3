"""What a resumed run continues with that differs from the run that saved its checkpoint: one warning for each.

Every checkpoint contains the settings of its run and hashes of its inputs: models, tokenizer, user code, data files,
versions of packages. A key that is added to the schema is compared unless it is listed here. The hash of a model does
not depend on its folder or on how weights are divided into files. Of large weights, a sample is read.
"""

from __future__ import annotations

import hashlib
import json
import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from ebft.catalog import lasting_name
from ebft.config.axolotl import CarriedOverKeys
from ebft.config.schema import RunConfig
from ebft.config.section import Section, flat_settings
from ebft.config.tool_keys import EvaluationKeys, RayKeys
from ebft.config.user_functions import module_sources
from ebft.data.sources import source_files
from ebft.errors import DataError, shortened
from ebft.files import file_hash, json_hash, json_object, safetensors_header
from ebft.methods.method import foreign_keys
from ebft.models.keys import PrecisionKeys
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


def run_record(config: RunConfig, tokenizer: Any, uses_bf16: bool, data_hashes: Sequence[str | None]) -> dict[str, Any]:
    """What a checkpoint contains about its run, as JSON. `data_hashes`: those of `datasets`."""
    return {
        "settings": compared_settings(config, uses_bf16),
        "names": {"chat_template": config.chat_template, "base_model": config.model_name},
        "inputs": json.loads(json.dumps(_inputs(config, tokenizer, data_hashes), default=str)),
    }


def _inputs(config: RunConfig, tokenizer: Any, data_hashes: Sequence[str | None]) -> dict[str, dict[str, Any]]:
    base = model_folder(config.base_model, config.revision_of_model)
    settings = base if config.base_model_config is None else model_folder(config.base_model_config)
    texts = base if config.tokenizer_config is None else model_folder(config.tokenizer_config)
    found: dict[str, dict[str, Any]] = {"base_model": {}, "code": {}, "packages": dict(versions())}
    if base is not None:
        found["base_model"]["weights"] = weights_hash(base, config.gguf_file)
        for path in sorted(base.glob("*.py")) if config.trust_remote_code else []:
            found["base_model"][path.name] = sample_hash(path)
    found["config.json"] = {} if settings is None else settings_of(settings, "config.json")
    found["tokenizer"] = {} if texts is None else tokenizer_hashes(texts)
    found["chat_template"] = {"text": json_hash(tokenizer.chat_template)}
    rewards = (config.trl.reward_funcs or []) if config.method.rows == "prompts" else []
    folders = {str(place): model_folder(name) for place, name in enumerate(rewards)}
    found["trl.reward_funcs"] = {
        place: json_hash([weights_hash(folder), tokenizer_hashes(folder)])
        for place, folder in folders.items()
        if folder is not None
    }
    types = {entry.type for entry in (*config.datasets, *config.test_datasets)}  # their rows are compared
    functions = [name for name in imported_names(config) if name not in types]
    sources = module_sources(name.rpartition(".")[0] for name in functions)
    found["code"] = {name: json_hash(source) for name, source in sources.items()}
    given = [*data_hashes, *[None] * (len(config.datasets) - len(data_hashes))]
    found["datasets"] = {str(n): _of_data(entry, given[n]) for n, entry in enumerate(config.datasets)}
    found["test_datasets"] = {str(n): _of_data(entry, None) for n, entry in enumerate(config.test_datasets)}
    if not config.uses_server:
        found["packages"].pop("vllm", None)
    return found


def _of_data(entry: Any, known_hash: str | None) -> str:
    """The contents of the files of a dataset entry, or else its name and revision."""
    try:
        files = source_files(entry) if known_hash is None else []
        if files is not None:
            return known_hash or json_hash([sample_hash(path) for _, path in files])
    except (DataError, OSError):
        pass
    return json_hash([without_secrets(entry.path), entry.name, entry.revision])


def warn_of_changes(config: RunConfig, now: Mapping[str, Any], folder: Path | None, is_finished: bool) -> None:
    """One warning for each setting and input in `now`, a `run_record`, that differs from that of the run in `folder`.

    `folder` is None for a new run. `is_finished`: whether nothing is trained, so that changes have no effect.
    """
    if folder is None:
        return
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


_ALL = 2**26  # bytes; weights and files up to this size are read as a whole
_BLOCK = 2**14  # bytes read of each tensor of larger weights
_TENSORS = 4096  # at most this many of their tensors are sampled
_BLOCKS = 1024  # of larger files that are not safetensors
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model")
# Entries of JSON files about the place or the program that saved them, and the template, which is compared separately.
_LEFT_OUT = ("name_or_path", "is_local", "local_files_only", "transformers_version", "chat_template")


def model_folder(name: str, revision: str | None = None) -> Path | None:
    """The folder of the model `name`; for a Hub id, its folder in the cache. None if there is none."""
    folder = Path(lasting_name(name))
    if folder.is_dir():
        return folder
    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # not a Hub id
        return None
    return Path(found).parent if isinstance(found, str) else None


def weights_hash(folder: Path, gguf_file: str | None = None) -> str | None:
    """The tensors of the model or the adapter in `folder`: their names, types and shapes, and a sample of each.

    None if there are no weights, or if they cannot be read, which is reported where they are loaded.
    """
    try:
        if gguf_file is not None:
            return sample_hash(folder / gguf_file)
        files = _weight_files(folder)
        if files and files[0].suffix == ".safetensors":
            return _tensors_hash(files)
        return json_hash([sample_hash(path) for path in files]) if files else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, struct.error):
        return None


def tokenizer_hashes(folder: Path) -> dict[str, str]:
    """The hash of each file of the tokenizer in `folder`; of JSON files, that of their contents."""
    paths = {path for pattern in _TOKENIZER for path in folder.glob(pattern) if path.is_file()}
    return {path.name: _settings_hash(path) for path in sorted(paths)}


def settings_of(folder: Path, name: str) -> dict[str, Any]:
    """The contents of a JSON file of settings such as config.json, without those that do not affect the model."""
    try:
        values = json_object(folder / name)
    except (OSError, ValueError):  # reported where it is loaded
        return {}
    return {key: value for key, value in values.items() if not key.startswith("_") and key not in _LEFT_OUT}


def sample_hash(path: Path) -> str:
    """The hash of a file's size and contents; of more than 64 MiB, of 1,024 evenly spaced blocks."""
    size = path.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _ALL:
            found.update(file.read())
        else:
            for block in range(_BLOCKS):
                file.seek((size - _BLOCK) * block // (_BLOCKS - 1))
                found.update(file.read(_BLOCK))
    return found.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers or PEFT load from a folder."""
    for name in ("adapter_model.safetensors", "model.safetensors", "pytorch_model.bin", "adapter_model.bin"):
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            return [folder / file for file in sorted(set(json_object(index)["weight_map"].values()))]
    return sorted(folder.glob("*.safetensors"))


def _tensors_hash(files: list[Path]) -> str:
    tensors = sorted((name, *rest) for path in files for name, *rest in _tensors(path))
    reads_all = sum(end - start for *_, start, end in tensors) <= _ALL
    every = 1 if reads_all else -(-len(tensors) // _TENSORS)
    found = hashlib.sha256()
    for place, (name, dtype, shape, path, start, end) in enumerate(tensors):
        found.update(json.dumps([name, dtype, shape]).encode())
        if place % every:
            continue
        length = end - start if reads_all else min(end - start, _BLOCK)
        with path.open("rb") as file:
            file.seek(start + (end - start - length) // 2)
            found.update(file.read(length))
    return found.hexdigest()


def _tensors(path: Path) -> Iterator[tuple[str, str, list[int], Path, int, int]]:
    """Name, dtype, shape, file, start and end of each tensor of a safetensors file."""
    header, begin = safetensors_header(path)
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        yield name, entry["dtype"], entry["shape"], path, begin + start, begin + end


def _settings_hash(path: Path) -> str:
    try:
        return json_hash(settings_of(path.parent, path.name)) if path.suffix == ".json" else file_hash(path)
    except OSError:  # reported where it is loaded
        return ""
