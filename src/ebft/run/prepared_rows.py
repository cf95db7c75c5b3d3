"""Rows that are read from `dataset_prepared_path`, or prepared and stored there, in a folder named by their key.

The key is a hash of everything that determines the rows: settings, data, transforms, tokenizer, code.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from datasets import Dataset, disable_progress_bars, enable_progress_bars, load_from_disk
from datasets.utils import are_progress_bars_disabled
from transformers import PreTrainedTokenizerBase

from ebft.config.axolotl import UNTYPED
from ebft.config.schema import RunConfig
from ebft.config.section import flat_settings
from ebft.config.user_functions import module_sources
from ebft.data.load import LoadedRows
from ebft.data.row_counts import SectionReport
from ebft.data.sources import source_fingerprint
from ebft.data.tables import discard
from ebft.data.transforms import built_in, own_transform
from ebft.errors import DataError
from ebft.files import file_hash, json_hash, locked, text_hash
from ebft.printed import say
from ebft.processes import is_main_process


class Prepared(NamedTuple):
    """The rows of a run, the folder in which they are stored, and whether they were prepared now."""

    rows: LoadedRows
    folder: Path
    is_new: bool


def prepare_rows(config: RunConfig, tokenizer: PreTrainedTokenizerBase, base: Path) -> Prepared:
    """The rows of a run, read from a folder in `base`, or prepared and stored in it if there are none that fit.

    Of several processes, one prepares the rows while the others wait. Damaged rows are prepared again, with a line.
    Raises DataError if the rows cannot be loaded, or not be written.
    """
    inputs = row_inputs(config, tokenizer)
    folder = base.expanduser() / key_of(inputs)
    with suppress(DamagedRows):  # perhaps another process replaces them; reported below if not
        if (rows := read_rows(folder)) is not None:
            return Prepared(rows, folder, is_new=False)
    problem = lambda error: DataError(
        f"dataset_prepared_path: cannot write to {folder.parent} ({error.strerror or error}). Choose another folder, "
        "or leave it unset to prepare rows in every run."
    )
    waiting = lambda: _say(f"Waiting for another process that prepares the rows in {folder}")
    with locked(folder, problem, waiting):
        try:
            if (rows := read_rows(folder)) is not None:
                return Prepared(rows, folder, is_new=False)
        except DamagedRows as damage:
            _say(f"Prepared rows in {folder} are damaged ({damage}); they are prepared again", of_any_rank=True)
        changed = closest_difference(folder.parent, inputs)
        if changed:
            _say(f"Preparing new rows: the most similar ones in {folder.parent} differ in {', '.join(changed)}")
        rows = config.method.load_rows(config, tokenizer)
        if data_hashes(config) != inputs["data"]:
            raise DataError("A file of datasets or test_datasets was changed while it was read. Run the command again.")
        write_rows(folder, rows, inputs)
        for part in (rows.train, rows.evaluation):
            if part is not None:
                discard(part)
        return Prepared(read_rows(folder), folder, is_new=True)


def describe(prepared: Prepared) -> str:
    """One line with the folder and the numbers of rows."""
    rows, did = prepared.rows, "Stored" if prepared.is_new else "Using"
    evaluation = "" if rows.evaluation is None else f", {len(rows.evaluation):,} for evaluation"
    return f"{did} prepared rows in {prepared.folder}: {len(rows.train):,} for training{evaluation}"


def _say(line: str, of_any_rank: bool = False) -> None:
    if of_any_rank or is_main_process():
        say(line, err=True)


def closest_difference(base: Path, inputs: dict[str, Any]) -> list[str]:
    """The names of what differs between `inputs` and the stored rows in `base` with the fewest differences.

    Empty if there are no stored rows.
    """
    found = [differences(stored, inputs) for stored in _stored_inputs(base)]
    return min(found, key=lambda names: (len(names), names), default=[])


def differences(stored: dict[str, Any], inputs: dict[str, Any]) -> list[str]:
    """The settings that differ, and which of data, transforms, tokenizer and code do."""
    before, now = stored.get("settings", {}), inputs["settings"]
    settings = [key for key in {**now, **before} if (key in before, before.get(key)) != (key in now, now.get(key))]
    return settings + [name for name in inputs if name != "settings" and stored.get(name) != inputs[name]]


def _stored_inputs(base: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(base.glob(f"[!.]*/{RECORD}")):
        try:
            inputs = json.loads(path.read_text(encoding="utf-8"))["inputs"]
        except (OSError, ValueError, TypeError, KeyError):  # damaged rows explain nothing
            continue
        if isinstance(inputs, dict):
            yield inputs


RECORD = "prepared.json"
_PARTS = {"train": "train", "evaluation": "eval"}  # fields of LoadedRows, and their folders


class DamagedRows(Exception):
    """A folder of prepared rows is incomplete or was changed; the message is the reason."""


def read_rows(folder: Path) -> LoadedRows | None:
    """The rows in `folder`, or None if it does not exist. Raises DamagedRows."""
    if not folder.exists():
        return None
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        if record["key"] != folder.name:
            raise DamagedRows(f"{RECORD} has the key {record['key']}")
        for name, expected in record["files"].items():
            if not (folder / name).is_file():
                raise DamagedRows(f"{name} is missing")
            if file_hash(folder / name) != expected:
                raise DamagedRows(f"{name} was changed")
        parts = {field: _read_part(folder / name, record["rows"][name]) for field, name in _PARTS.items()}
        return LoadedRows(**parts, reports=[SectionReport(**report) for report in record["reports"]])
    except DamagedRows:
        raise
    except Exception as error:  # JSON and Arrow readers raise many types of errors
        raise DamagedRows(f"{type(error).__name__}: {error}") from error


def _read_part(folder: Path, rows: int | None) -> Dataset | None:
    if rows is None:
        return None
    part = load_from_disk(str(folder))
    if len(part) != rows:
        raise DamagedRows(f"{folder.name} has {len(part)} rows instead of {rows}")
    return part


def write_rows(folder: Path, rows: LoadedRows, inputs: dict[str, Any]) -> None:
    """Write `rows`, made from `inputs`, to `folder`, replacing it. To be called while holding the lock of `folder`.

    Raises DataError if writing fails; then, or if the process is killed, `folder` does not exist.
    """
    for left in folder.parent.glob(f".{folder.name}.*.partial"):  # of killed processes
        shutil.rmtree(left, ignore_errors=True)
    partial = folder.parent / f".{folder.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.partial"
    try:
        partial.mkdir(parents=True)
        parts = {name: getattr(rows, field) for field, name in _PARTS.items()}
        with _without_progress():
            for name, part in parts.items():
                if part is not None:
                    part.save_to_disk(str(partial / name))
        written = sorted(path for path in partial.rglob("*") if path.is_file())
        record = {
            "key": folder.name,
            "rows": {name: None if part is None else len(part) for name, part in parts.items()},
            "files": {path.relative_to(partial).as_posix(): file_hash(path) for path in written},
            "reports": [asdict(report) for report in rows.reports],
            "inputs": inputs,
        }
        (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except OSError as error:
        raise DataError(
            f"Prepared rows cannot be written to {folder} ({error.strerror or error}). Set dataset_prepared_path to "
            "another folder."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _without_progress() -> Iterator[None]:
    were_on = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if were_on:
            enable_progress_bars()


FORMAT = 1  # of the stored folder
# Entries of tokenizer_config.json about the place that the tokenizer was loaded from.
_PLACE = ("is_local", "local_files_only", "name_or_path")


def row_inputs(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Everything that determines the rows of a run, as JSON: settings, data, transforms, tokenizer, code.

    Raises DataError if a data source or a transform does not exist.
    """
    sources = transform_sources([entry.type for entry in (*config.datasets, *config.test_datasets)])
    inputs = {
        "format": FORMAT,
        "settings": row_settings(config, sources.values()),
        "data": data_hashes(config),
        "transforms": {name: text_hash(source) for name, source in sorted(sources.items())},
        "tokenizer": tokenizer_hashes(tokenizer),
        "code": own_code(),
    }
    return json.loads(json.dumps(inputs, default=str))


def data_hashes(config: RunConfig) -> list[dict[str, Any]]:
    """The hashes of each source of `datasets` and `test_datasets`."""
    return [source_fingerprint(entry) for entry in (*config.datasets, *config.test_datasets)]


def key_of(inputs: dict[str, Any]) -> str:
    """The key of rows with these inputs: 32 hexadecimal digits."""
    return json_hash(inputs)[:32]


def tokenizer_hashes(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """The hash of each file that saves the tokenizer, and of its chat template and its class."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        found = {path.relative_to(folder).as_posix(): file_hash(path) for path in paths}
        settings = Path(folder) / "tokenizer_config.json"
        if settings.is_file():
            values = json.loads(settings.read_text(encoding="utf-8"))
            found[settings.name] = json_hash({name: value for name, value in values.items() if name not in _PLACE})
    found["chat template"] = text_hash(json.dumps(tokenizer.chat_template))
    source = inspect.getsourcefile(type(tokenizer))
    found["class"] = type(tokenizer).__name__ if source is None else file_hash(Path(source))
    return found


_PACKAGE = Path(__file__).parents[1]
# Files of this package that rows depend on.
_OWN = ("data/**/*.py", "anchors.py", "models/tokenizer.py", "models/templates/*.jinja", "nemo_gym/keys.py")
_LIBRARIES = ("ebft", "datasets", "transformers", "tokenizers", "jinja2")


def own_code() -> dict[str, str]:
    """The hash of the code of this package that makes rows, and the versions of the libraries that it uses."""
    found = hashlib.sha256()
    for path in sorted({path for pattern in _OWN for path in _PACKAGE.glob(pattern)}):
        found.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return {"data loading": found.hexdigest(), **{name: version(name) for name in _LIBRARIES}}


def transform_sources(names: list[str]) -> dict[str, str]:
    """The source of each module that the custom transforms among `names` are defined in or import.

    Modules that are imported by them are included unless they are installed packages, whose changes are not detected.
    Raises DataError if a transform does not exist.
    """
    own = {name: own_transform(name) for name in names if built_in(name) is None}
    return module_sources(
        module for name, function in own.items() for module in {name.rpartition(".")[0], function.__module__}
    )


# Reason -> keys that do not determine rows, for all methods.
_REASONS = {
    "the tokenizer's files are compared": """
        base_model gguf_file base_model_config revision_of_model tokenizer_config trust_remote_code chat_template
        special_tokens.pad_token special_tokens.eos_token special_tokens.bos_token special_tokens.unk_token
        special_tokens.additional_special_tokens tokens added_tokens_overrides chat_template_jinja
        model_type tokenizer_type is_llama_derived_model""",
    "it only affects the model": """
        torch_dtype device_map load_in_4bit load_in_8bit bf16 fp16 tf32
        attn_implementation flash_attention flex_attention sdp_attention eager_attention xformers_attention
        experts_implementation overrides_of_model_config.output_router_logits
        overrides_of_model_config.router_aux_loss_coef bnb_config_kwargs neftune_noise_alpha
        resize_token_embeddings_to_32x shrink_embeddings mean_resizing_embeddings
        unfrozen_parameters peft_use_dora peft_use_rslora peft_layers_to_transform peft_layers_pattern
        peft_init_lora_weights lora_target_parameters
        adapter lora_r lora_alpha lora_dropout lora_target_modules lora_target_linear lora_modules_to_save
        lora_model_dir lora_mlp_kernel lora_qkv_kernel lora_o_kernel liger_rope liger_rms_norm liger_glu_activation
        liger_layer_norm liger_fused_linear_cross_entropy""",
    "it only affects the optimizer": """
        learning_rate optimizer optim_args lr_scheduler lr_scheduler_kwargs warmup_steps
        warmup_ratio weight_decay max_grad_norm
        adam_beta1 adam_beta2 adam_epsilon
        cosine_min_lr_ratio lr_groups lr_groups.name lr_groups.modules lr_groups.lr embedding_lr embedding_lr_scale
        loraplus_lr_ratio loraplus_lr_embedding""",
    "it only affects how rows are batched and how often": """
        micro_batch_size gradient_accumulation_steps batch_size eval_batch_size num_epochs max_steps budget.documents
        budget.generated_tokens budget.flops group_by_length dataloader_num_workers dataloader_pin_memory
        dataloader_prefetch_factor
        pad_to_sequence_len eval_sample_packing batch_flattening""",
    "rows are packed after they are read": "sample_packing",
    "rows of a stream are not stored": """
        pretraining_dataset streaming streaming_multipack_buffer_size pretrain_multipack_buffer_size
        pretrain_multipack_attn pretraining_dataset.path pretraining_dataset.name pretraining_dataset.split
        pretraining_dataset.text_column pretraining_dataset.type pretraining_dataset.skip
        pretraining_dataset.data_files pretraining_dataset.ds_type pretraining_dataset.revision
        pretraining_dataset.trust_remote_code pretraining_dataset.weight""",
    "it only affects how fast rows are prepared": "dataset_num_proc",
    "it is the place of prepared rows": "dataset_prepared_path skip_prepare_dataset",
    "it only affects memory and processes": """
        gradient_checkpointing gradient_checkpointing_kwargs gradient_checkpointing_kwargs.use_reentrant torch_compile
        torch_compile_backend torch_compile_mode chunked_cross_entropy dp_shard_size dp_replicate_size
        context_parallel_size
        tensor_parallel_size expert_parallel_size
        ddp ddp_find_unused_parameters deepspeed fsdp fsdp_config fsdp_version activation_offloading local_rank
        fsdp_config.version fsdp_config.state_dict_type fsdp_config.final_state_dict_type
        fsdp_config.reshard_after_forward fsdp_config.cpu_offload fsdp_config.cpu_ram_efficient_loading
        fsdp_config.auto_wrap_policy fsdp_config.transformer_layer_cls_to_wrap fsdp_config.min_num_params
        fsdp_config.activation_checkpointing use_ray ray_num_workers ray_run_name ray_max_failures
        resources_per_worker""",
    "it only affects checkpoints and logs": """
        output_dir save_strategy save_steps saves_per_epoch save_total_limit save_only_model save_safetensors
        resume_from_checkpoint auto_resume_from_checkpoints logging_steps report_to plugins use_tensorboard use_wandb
        use_trackio trackio_project_name wandb_project wandb_entity wandb_name wandb_run_id wandb_watch
        loss_watchdog_threshold loss_watchdog_patience trackio_space_id use_mlflow mlflow_tracking_uri
        mlflow_experiment_name hf_mlflow_log_artifacts use_comet comet_workspace comet_project_name
        comet_experiment_key comet_mode comet_online
        wandb_log_model wandb_mode hub_model_id hub_strategy hub_private_repo profiler_steps debug strict""",
    "it only affects when and how models are evaluated": """
        eval_strategy eval_steps eval_on_start early_stopping_patience
        evals_per_epoch load_best_model_at_end metric_for_best_model
        greater_is_better evaluation.metrics evaluation.samples evaluation.pass_at evaluation.temperature
        evaluation.max_new_tokens evaluation.documents evaluation.bootstrap evaluation.confidence
        evaluation.per_document""",
    "it only affects rollouts, rewards and losses": """
        center_rewards_coefficient
        rl_beta precompute_ref_log_probs dpo_loss_type dpo_loss_weights dpo_label_smoothing dpo_use_weighting
        kto_desirable_weight kto_undesirable_weight orpo_alpha simpo_gamma cpo_alpha
        ebft.shared_prefix ebft.disable_dropout ebft.feature_layers ebft.embed_method ebft.use_whitening
        ebft.whitening_space ebft.alignment_coef ebft.diversity_coef ebft.feature_device ebft.ce_coef
        ebft.advantage_estimator ebft.rloo_baseline ebft.stride ebft.n_samples_per_prompt ebft.temperature ebft.top_p
        ebft.rl_coef ebft.rollout_tokens_per_pass ebft.single_pass ebft.merge_rollouts ebft.log_completions
        ebft.grad_norms_every
        ebft.adaptive_max_tokens ebft.gt_length_multiplier ebft.gt_length_floor
        trl.vllm_sync_interval trl.async_prefetch trl.prefetch_depth trl.replay_buffer_size trl.replay_recompute_logps
        trl.reroll_start_fraction trl.reroll_max_groups trl.reward_num_workers trl.reward_timeout
        trl.streaming_partial_batch trl.streaming_min_groups trl.skip_zero_advantage_batches trl.use_data_producer
        trl.log_completions trl.num_completions_to_print trl.reward_funcs trl.reward_weights
        trl.multi_objective_aggregation trl.beta trl.num_iterations trl.epsilon trl.epsilon_high trl.loss_type
        trl.scale_rewards trl.mask_truncated_completions trl.vllm_importance_sampling_correction
        trl.importance_sampling_level trl.vllm_importance_sampling_mode trl.vllm_importance_sampling_cap
        trl.off_policy_mask_threshold trl.use_bias_correction_kl trl.sync_ref_model trl.ref_model_mixup_alpha
        trl.ref_model_sync_steps trl.tools trl.environment_factory trl.max_tool_calling_iterations trl.rollout_func
        trl.num_generations trl.generation_batch_size trl.max_completion_length trl.temperature trl.top_p trl.top_k
        trl.min_p trl.repetition_penalty trl.generation_kwargs trl.vllm_guided_decoding_regex""",
    "it only affects servers": """
        trl.use_vllm trl.vllm_mode trl.vllm_logp_diff_warn trl.vllm_logp_diff_stop trl.vllm_server_host
        trl.vllm_server_port trl.vllm_server_timeout trl.vllm_lora_sync trl.vllm_enable_sleep_mode
        vllm.python vllm.env vllm.host vllm.port vllm.device vllm.tensor_parallel_size vllm.data_parallel_size
        vllm.gpu_memory_utilization vllm.dtype vllm.max_model_len vllm.enable_prefix_caching vllm.enable_reasoning
        vllm.reasoning_parser vllm.tool_call_parser vllm.enforce_eager vllm.serve_module vllm.worker_extension_cls
        nemo_gym_auto_clone nemo_gym_auto_start nemo_gym_config_paths nemo_gym_head_port nemo_gym_server_timeout
        nemo_gym_verify_timeout nemo_gym_multi_turn""",
}
EXCLUDED: dict[str, str] = {key: reason for reason, keys in _REASONS.items() for key in keys.split()}
EXCLUDED |= dict.fromkeys(UNTYPED, "it has no effect")
# What else a custom transform must contain for a key to affect its rows: batches end where processes do.
_OTHER_WORDS = {"dataset_num_proc": ("batched",)}


def row_settings(config: RunConfig, transform_sources: Iterable[str] = ()) -> dict[str, Any]:
    """The settings that determine the rows, by dotted key.

    Custom transforms may read any key of the config: excluded keys whose names occur in one of `transform_sources` are
    included.
    """
    words = {word for source in transform_sources for word in re.findall(r"\w+", source)}
    idle = set(EXCLUDED) | _idle_seeds(config)
    names = lambda key: {key.rpartition(".")[2], *_OTHER_WORDS.get(key, ())}
    return {key: value for key, value in flat_settings(config) if key not in idle or words & names(key)}


def _idle_seeds(config: RunConfig) -> set[str]:
    """The seeds that no row depends on.

    `data_seed` (else `seed`) shuffles; `seed` selects held-out documents and those of the fraction of a `weight`.
    """
    selects = bool(config.val_set_size and not config.test_datasets)
    selects = selects or any(entry.weight is not None and entry.weight % 1 for entry in config.datasets)
    shuffles = config.shuffle_merged_datasets
    idle = set() if selects or (shuffles and config.data_seed is None) else {"seed"}
    return idle if shuffles else idle | {"data_seed"}
