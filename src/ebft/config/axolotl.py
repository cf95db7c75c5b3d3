"""Keys of configs for axolotl and other trainers, in tables: key, harmless values, reason.

A key without effect is accepted without a warning if its value describes what happens here anyway. Unsupported keys are
errors, unless they are empty or false. Other keys have another name here.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pydantic import Field, create_model, model_validator

from ebft.config.section import Section
from ebft.errors import warn

IN_CHUNKS = "SFT and strided mode compute the cross-entropy in chunks without it; see chunked_cross_entropy"
# Those that a method trains; others are refused.
_CLASSES = ("AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoModelForTokenClassification")

# Names -> what to do instead.
_UNSUPPORTED = {
    # Adapters and weights
    "relora relora_steps relora_warmup_steps relora_anneal_steps relora_prune_ratio relora_cpu_offload "
    "relora_prune_method jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps": "ReLoRA merges "
    "the adapter into the base weights during training, so that the result is not an adapter of base_model. Remove it, "
    "or train all weights",
    "peft": "base weights are quantised with load_in_4bit or load_in_8bit, without LoftQ, which changes them, and "
    "without torchao. Remove it",
    "peft_trainable_token_indices": "ebft merge-lora merges whole weights. Set lora_modules_to_save: [embed_tokens, "
    "lm_head]",
    "peft_layer_replication": "the adapter would belong to a model with more layers than base_model. Remove it",
    "peft_ensure_weight_tying": "set lora_modules_to_save: [embed_tokens, lm_head], which are trained apart",
    "mora": "PEFT's LoRA is the only adapter. Set adapter: lora",
    "spectrum_top_fraction spectrum_model_name": "list the parameters in unfrozen_parameters",
    "fp8_config": "the only recipe is tensorwise, the default of fp8. Remove it",
    "float32": "set bf16: false, which trains in float32",
    "nonexpert_quantization gemma4_fp8_nonexpert gemma4_nf4_nonexpert dsv4_fp8_nonexpert_mode": "weights are "
    "quantised with load_in_4bit or load_in_8bit only. Remove it",
    "fp32_norms fp32_norm_classes scaling_softmax scaling_softmax_factor scaling_softmax_bias s2_attention dense_mixer "
    "use_pose pose_split_on_token_ids pose_max_context_len pose_num_chunks use_onebitllms": "layers and positions are "
    "those of the model. Remove it",
    "overrides_of_model_kwargs rope_scaling": "edit a copy of config.json, and name its folder in base_model_config",
    "fix_untrained_tokens": "it changes the base weights before training. List new tokens in tokens",
    # Attention
    "sage_attention": "quantised attention differs from the model's own attention. Set attn_implementation: sdpa",
    # Data
    "default_system_message": "set system_prompt of the datasets, or write it into the text of chat_template",
    "eval_sequence_len": "held-out rows are limited by sequence_len, too. Remove it",
    "role_boundaries": "labels follow the turns of the chat template. Use roles_to_train and train_on_eos",
    "dispatch_batches split_batches accelerator_config": "the method splits batches over processes. Remove it",
    "is_multimodal processor_type processor_config processor_kwargs image_size image_resize_algorithm "
    "image_token_id audio_sampling_rate trl.log_multimodal": "models are trained on text only. Remove it",
    # Other losses and other classes of models
    "diffusion": "masked-diffusion models are another class of models: their attention sees both directions, they are "
    "trained to fill in masked tokens, and they need another sampler. Remove it",
    "grokfast_alpha grokfast_lamb kd_trainer kd_ce_alpha "
    "kd_alpha kd_temperature kd_beta kd_normalize_topk kd_online_server_base_url kd_online_topk kd_online_server "
    "kd_online_timeout kd_temperature_min trl.entropy_coef trl.use_adaptive_entropy trl.entropy_target "
    "trl.entropy_coef_delta trl.entropy_coef_min trl.entropy_coef_max": "losses have no such term, and gradients are "
    "not filtered. Remove it",
    "llmcompressor": "ebft quantize quantises a trained model. Remove it",
    "cloud hatchery": "training runs on this machine, and not in a remote service. Remove it, and start "
    "ebft there, for example with SkyPilot, or set use_ray",
    "trainer_cls": "each method has its own trainer. Use plugins, or the trainers in Python",
    "expert_parallel_backend expert_parallel_num_nvl_bytes expert_parallel_num_rdma_bytes "
    "expert_parallel_token_capacity expert_parallel_fallback_on_unsupported": "experts are not split over processes. "
    "Shard the model with fsdp",
    # Optimizer, batches, memory
    "lr_div_factor": "it belongs to lr_scheduler: one_cycle, which transformers does not have. Remove it",
    "dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of qgalore_rank qgalore_update_proj_gap qgalore_scale "
    "qgalore_proj_type qgalore_proj_quant qgalore_proj_bits qgalore_proj_group_size "
    "qgalore_cos_threshold qgalore_gamma_proj qgalore_queue_size adam_beta3 adam_epsilon2": "transformers has no "
    "optimizer that reads it. Remove it",
    "torch_compile_options": "use torch_compile_mode",
    "cosine_constant_lr_ratio": "transformers has no such schedule. Use lr_scheduler: warmup_stable_decay with "
    "lr_scheduler_kwargs, or cosine_min_lr_ratio alone",
    "optim_target_modules": "it is for galore and apollo, which are not supported. Remove it",
    "auto_find_batch_size": "it changes the batch size of a run. `ebft doctor` measures the memory of a step",
    "dataloader_drop_last": "the last rows of an epoch are trained on. Remove it",
    "offload_optimizer": "use deepspeed: zero3_offload or fsdp_config with cpu_offload",
    # Trackers and evaluation
    "comet_experiment_config": "set the keys that start with comet_",
    "comet_api_key swanlab_api_key": "do not write it into a file. Set the variable COMET_API_KEY or SWANLAB_API_KEY",
    "hub_revision": "models are pushed to the main branch of hub_model_id. Remove it",
    "bench_dataset bench_split lm_eval_tasks lm_eval_batch_size lm_eval_post_train lm_eval_model": "use ebft evaluate",
    "dataset_shard_num dataset_shard_idx": "set shards and shards_idx of the datasets",
    "dpo_generate_during_eval generate_during_eval": "remove it; preference methods do not sample",
    "max_new_tokens": "set trl.max_completion_length",
    "rpo_alpha": "set dpo_loss_type: [sigmoid, sft] and dpo_loss_weights: [1.0, alpha]",
    "dpo_norm_loss": "set dpo_loss_type: sigmoid_norm",
    "dpo_use_liger_kernel dpo_padding_free dpo_use_logits_to_keep": "remove it; TRL's DPOTrainer pads batches, and "
    "computes the log-probabilities of completions in chunks",
    "rl_adapter_ref_model ref_model": "remove it; the reference model is base_model, or the adapter of "
    "lora_model_dir as it is loaded",
}
UNSUPPORTED_KEYS = {name: reason for names, reason in _UNSUPPORTED.items() for name in names.split()}

# Keys of an element of datasets.
UNSUPPORTED_IN_DATASETS = {
    "conversation": "set chat_template of the config",
    "chat_template_jinja": "set chat_template of the config to the text of the template",
    "message_field_training_detail": "use message_field_training, for whole turns",
    "input_format": "set type to a mapping with format",
    "input_transform": "use a custom transform as type",
    "text_column": "set field",
}

_CONVERSATIONS = {"chatml": "chatml", "llama-3": "llama3", "llama3": "llama3", "gemma": "gemma"}  # to chat templates

# Key -> its other names, which are accepted. Where both names have a value, the key counts.
_ACCEPTED = {
    "adam_epsilon": "adam_eps",
    "context_parallel_size": "sequence_parallel_degree",
    "cut_cross_entropy": "use_cut_cross_entropy",
    "dataset_num_proc": "dataset_processes",
    "deepspeed": "deepspeed_config",
    "eval_strategy": "evaluation_strategy",
    "liger_glu_activation": "liger_swiglu",
    "model_type": "type_of_model",
    "neftune_noise_alpha": "noisy_embedding_alpha",
    "rl_beta": "dpo_beta",
    "use_dynamic_finetuning": "use_dft",
    "wandb_name": "wandb_run_name trackio_run_name mlflow_run_name swanlab_experiment_name",
}
_OF_TRL = {"vllm_importance_sampling_clip_max": "vllm_importance_sampling_cap"}  # names of keys in `trl:`
# Key -> its names in other trainers, which are accepted with a warning.
_ELSEWHERE = {
    "base_model": "model model_name_or_path",
    "flash_attention": "use_flash_attention",
    "gradient_checkpointing": "use_gradient_checkpointing",
    "lora_model_dir": "adapter_path",
    "test_datasets": "val_datasets eval_datasets",
    "eval_batch_size": "per_device_eval_batch_size",
    "learning_rate": "lr",
    "lora_modules_to_save": "modules_to_save",
    "peft_use_dora": "use_dora",
    "sample_packing": "packing",
    "lora_r": "lora_rank",
    "lora_target_modules": "lora_target lora_targets target_modules",
    "lr_scheduler": "lr_scheduler_type",
    "micro_batch_size": "per_device_train_batch_size",
    "num_epochs": "epochs num_train_epochs",
    "optimizer": "optim",
    "revision_of_model": "model_revision",
    "rl_beta": "beta kto_beta orpo_beta simpo_beta",
    "sequence_len": "max_length max_seq_len max_seq_length cutoff_len seq_len max_len",
    "tokenizer_config": "tokenizer_path tokenizer_name",
    "train_on_inputs": "train_on_input",
    "wandb_name": "run_name wandb_run",
}
_FOREIGN = {name for names in _ELSEWHERE.values() for name in names.split()}
SAME_KEYS = {name: key for table in (_ACCEPTED, _ELSEWHERE) for key, names in table.items() for name in names.split()}
# Keys with a value that has another form here: what it is replaced with, and what the user is told.
_OFFLOADED = (
    {"gradient_checkpointing": True, "activation_offloading": True},
    "is replaced with true, and activation_offloading: true: activations that are kept are offloaded to main memory",
)
_REPLACED: dict[tuple[str, Any], tuple[dict[str, Any], str]] = {
    **{("gradient_checkpointing", name): _OFFLOADED for name in ("offload", "unsloth")},
    **{
        ("activation_offloading", name): ({"activation_offloading": True}, "is replaced with true: to main memory")
        for name in ("legacy", "hidden_states", "disk")
    },
    ("optimizer", "adamw_hf"): ({"optimizer": "adamw_torch"}, "is replaced with adamw_torch: transformers removed it"),
    ("attn_implementation", "xformers"): ({}, "is ignored: the model's default has the same memory-efficient kernels"),
    ("float16", True): ({"fp16": True}, "is replaced with fp16: true, mixed precision with a scaled loss"),
    ("bfloat16", True): ({"bf16": True}, "is replaced with bf16: true, which has bfloat16 weights as well"),
    ("bfloat16", "auto"): ({"bf16": "auto"}, "is replaced with bf16: auto"),
}


class Ignored(NamedTuple):
    """A key without effect: the values that give no warning, and why other values change nothing."""

    harmless: tuple[Any, ...]
    reason: str


# Names -> why they have no effect. Some have other values than false that give no warning.
_OWN_LAYERS = "such kernels are not used; the model's own layers give the same results"
_OF_FILES = "it is determined by the files of the model and of the tokenizer"
_IGNORED = {
    # Kernels and layers
    "cut_cross_entropy chunked_cross_entropy_num_chunks liger_cross_entropy "
    "liger_fused_linear_cross_entropy": IN_CHUNKS,
    "liger_rms_norm_gated liger_use_token_scaling liger_kernel_impl flash_attn_cross_entropy flash_attn_rms_norm "
    "flash_attn_fuse_qkv flash_attn_fuse_mlp flash_optimum unsloth_cross_entropy_loss unsloth_lora_mlp "
    "unsloth_lora_qkv unsloth_lora_o unsloth_rms_norm unsloth_rope fused_attn_kernel use_dsv4_kernels "
    "use_glm_dsa_kernels dsv4_fp8_lora_kernel dsv4_shared_mlp_lora_kernel dsv4_bf16_all dsv4_fp4_grouped_mode "
    "expert_backend moe_grouped_backend moe_dequant_chunk_size moe_bnb_fast "
    "lora_embedding_kernel lora_mlp_kernel lora_qkv_kernel lora_o_kernel": _OWN_LAYERS,
    "use_scattermoe use_sonicmoe use_kernels": "experts are computed with transformers' own kernels; see "
    "experts_implementation",
    "llama4_linearized_experts": "experts are stacked, as in the original checkpoint, which base_model must name",
    "xformers_attention": "the model's default has the same memory-efficient kernels where it is sdpa",
    "gemma4_hybrid_attn_impl large_head_attention flash_attn_d512 sdpa_varlen": "all layers use attn_implementation; "
    "if it does not support the head size of one, as flash_attention_2 in Gemma 4, leave it unset",
    "tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp selective_checkpointing layer_offloading "
    "ple_cpu_offload": "results are the same; to save memory, use gradient_checkpointing, activation_offloading or "
    "fsdp_config with cpu_offload",
    "deepcompile flex_attn_compile_kwargs": "kernels are compiled with PyTorch's defaults",
    # Adapters and the model
    "lora_fan_in_fan_out": "PEFT determines the layout of the weights for each layer",
    "peft_autocast_adapter_dtype": "the weights of adapters are always float32",
    "merge_lora lora_on_cpu nvfp4_merge_aware nvfp4_merge_aware_start_step": "ebft merge-lora adds the adapter to the "
    "weights after training, one part at a time, in their own dtype",
    "merge_method": "ebft merge-lora uses memory_efficient, one part of the weights at a time, which has the result of "
    "legacy",
    "embeddings_skip_upcast qlora_sharded_model_loading low_cpu_mem_usage base_model_ignore_patterns": "transformers "
    "and PEFT load only what is needed, one weight at a time; see fsdp_config.cpu_ram_efficient_loading",
    "freeze_mm_modules": "only the text model is loaded",
    "use_peft use_qlora": "adapter decides it",
    "memory": "it is for schedulers of jobs",
    "is_falcon_derived_model is_mistral_derived_model is_qwen_derived_model is_llama_derived_model cls_model_config "
    "model_type tokenizer_type tokenizer_use_fast tokenizer_legacy gptq gptq_groupsize gptq_model_v1 gptq_use_triton "
    "gptq_disable_exllama": _OF_FILES,
    "tokenizer_use_mistral_common tokenizer_save_jinja_files": "the tokenizer is that of transformers, and saved with "
    "its chat template; without one, set chat_template",
    "bnb_4bit_quant_type bnb_4bit_use_double_quant bnb_4bit_compute_dtype bnb_4bit_quant_storage": "set it in "
    "bnb_config_kwargs, whose defaults are nf4 with double quantisation",
    "pad_token_id bos_token_id eos_token_id": "set the text of the token in special_tokens",
    "model_quantization_config_kwargs": "weights that are stored in MXFP4 are always dequantised",
    # Data
    "max_packed_sequence_len": "sample_packing: true packs documents into rows of sequence_len tokens",
    "sample_packing_seq_len_multiplier pretraining_sample_concatenation sample_packing_group_size "
    "sample_packing_bin_size sample_packing_eff_est sample_packing_sequentially sample_packing_mp_start_method "
    "total_num_tokens total_supervised_tokens multipack_real_batches": "all documents are packed together, longest "
    "first, into rows of at most sequence_len tokens, which are counted exactly",
    "pad_to_multiple_of pad_to_sequence_len collator_pad_to_longest": "batches are padded to their longest row",
    "num_dataset_shards_to_save push_dataset_to_hub dataset_keep_in_memory": "prepared rows are stored in "
    "dataset_prepared_path only, in files that datasets maps into memory",
    "skip_prepare_dataset": "rows are always prepared: in every run, or once with dataset_prepared_path",
    "train_on_eos": "it is a key of datasets",
    "eot_tokens": "the end of a turn is what the chat template writes after its content",
    "remove_unused_columns": "each method selects the columns that it reads",
    "shuffle_before_merging_datasets": "see shuffle_merged_datasets",
    "group_by_modality": "all rows are text",
    "max_prompt_len": "sequence_len limits the whole row",
    # Processes, memory and logs
    "ddp_bucket_cap_mb ddp_broadcast_buffers": "PyTorch's default is used; models have no buffers that change",
    "lr_quadratic_warmup": "the warmup of transformers' schedules is linear",
    "eta_min test_value": "it is not a key of axolotl either; eta_min is cosine_min_lr_ratio",
    "fp8_enable_fsdp_float8_all_gather": "FSDP gathers weights in their own dtype",
    "heads_k_stride ring_attn_func": "sequences are not split over processes",
    "fsdp_version": "fsdp uses FSDP2 only",
    "fsdp_final_state_dict_type": "the final model is always gathered and saved whole",
    "save_safetensors": "transformers 5 writes safetensors only, which PEFT and vLLM read, too",
    "local_rank world_size": "the launcher sets the rank and the number of processes",
    "device gpu_memory_limit experimental_skip_move_to_device": "the trainer places the model; see device_map",
    "torch_empty_cache_steps gc_collect_steps gc_steps": "the caching allocator frees memory when it is needed",
    "save_first_step dynamic_checkpoint": "a run that is interrupted saves a checkpoint; see save_steps",
    "is_preprocess preprocess_iterable axolotl_config_path model_config_type": "axolotl writes it for its own commands",
    "gradio_title gradio_share gradio_server_name gradio_server_port gradio_max_new_tokens gradio_temperature": "there "
    "is no page for prompts; use ebft inference",
    "use_otel_metrics otel_metrics_host otel_metrics_port": "metrics are written to metrics.jsonl in output_dir",
    "hf_use_auth_token use_auth_token push_to_hub push_adapter_to_hub": "hub_model_id uploads the model; see `hf auth "
    "login`",
    "include_tokens_per_second include_tkps do_causal_lm_eval": "it is always logged",
    "eval_causal_lm_metrics": "perplexity is always logged; for others use ebft evaluate",
    "do_bench_eval eval_table_size eval_table_max_new_tokens eval_max_new_tokens generate_samples "
    "num_generation_samples generation_max_new_tokens generation_temperature generation_top_p generation_top_k "
    "generation_prompt_ratio generation_do_sample": "use ebft evaluate, or log_rollouts",
    "swanlab_description swanlab_log_completions swanlab_completion_log_interval swanlab_completion_max_buffer "
    "swanlab_lark_webhook_url swanlab_lark_secret": "transformers does not pass it to SwanLab",
    "torchdistx_path": "torchdistx is not used",
    "strict": "an unknown key that is like another one is always an error",
    "debug": "there is no debug mode; `ebft preprocess --debug` shows rows",
}
_HARMLESS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("strict", "remove_unused_columns", "gptq_disable_exllama", "hf_use_auth_token"), (True, False)),
    **dict.fromkeys(("include_tokens_per_second", "include_tkps"), (True, False)),
    **dict.fromkeys(("peft_autocast_adapter_dtype", "low_cpu_mem_usage", "tokenizer_use_fast"), (True,)),
    **dict.fromkeys(("sample_packing_seq_len_multiplier", "pretraining_sample_concatenation"), (True, 1)),
    "save_safetensors": (True,),
    "local_rank": (),
    "train_on_eos": ("turn",),
    "merge_method": ("memory_efficient",),
    "fsdp_version": (2,),
    "fp8_enable_fsdp_float8_all_gather": (False, True),
    "fsdp_final_state_dict_type": ("FULL_STATE_DICT",),
    "model_type": _CLASSES,
    "tokenizer_type": ("AutoTokenizer",),
    "model_quantization_config_kwargs": ({"dequantize": True}, {}),
    "gc_steps": (-1,),
    "eval_causal_lm_metrics": ([], ["perplexity"]),
}
IGNORED_KEYS = {
    name: Ignored(_HARMLESS.get(name, (False,)), reason) for names, reason in _IGNORED.items() for name in names.split()
}
TYPED = {"fsdp_version": int | None, "model_type": str | None}
# Of keys that have an effect beside others.
_ABOUT = {
    "fsdp_version": "FSDP2 is always used.",
    "model_type": "No effect: the class is determined by the model's config and the method, which it must match.",
}


_FIELDS: dict[str, Any] = {
    name: (TYPED.get(name, Any), Field(None, description=_ABOUT.get(name, f"No effect: {ignored.reason}.")))
    for name, ignored in IGNORED_KEYS.items()
}
_IgnoredKeys: type[Section] = create_model("_IgnoredKeys", __base__=Section, __module__=__name__, **_FIELDS)
_PREFERENCES, _OF_REWARDS = ("dpo", "ipo", "orpo", "kto", "simpo"), ("grpo", "gdpo")


class CarriedOverKeys(_IgnoredKeys):
    """Keys of configs for other trainers, accepted so that those configs can be loaded."""

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_for_nothing(cls, data: Any) -> Any:
        """Accept unsupported keys that are empty or false, or repeat another key, as configs for other trainers do."""
        if not isinstance(data, dict):
            return data
        found = _asked(data, UNSUPPORTED_KEYS.keys() | SINGLE | {"bfloat16", "float16"}, SAME_KEYS)
        without = {key.removeprefix("trl.") for key in UNSUPPORTED_KEYS}
        found["trl"] = _asked(found.get("trl"), without, _OF_TRL) or None
        trl = found["trl"] if isinstance(found["trl"], dict) else {}
        beta, other = trl.get("beta"), found.get("rl_beta")  # two names of one coefficient
        if None not in (beta, other) and beta != other:
            warn(f"rl_beta: {other} has no effect: trl.beta: {beta} is the same coefficient.")
        beta = other if beta is None else beta
        if found.get("rl") in (*_OF_REWARDS, "ebft") and found.pop("rl_beta", None) is not None:
            found["trl"] = trl | {"beta": beta}
        elif found.get("rl") in _PREFERENCES and "beta" in trl:
            found |= {"rl_beta": beta, "trl": {key: trl[key] for key in trl if key != "beta"} or None}
        if found.get("fsdp") in (None, "", []):
            found |= {"fsdp": True} if found.get("fsdp_config") else dict.fromkeys(found.keys() & {"fsdp"})
        _replace_values(found)
        for section in ("datasets", "test_datasets"):
            if isinstance(found.get(section), list):
                found[section] = [_of_dataset(each, found) for each in found[section]]
        if "model_config" in found:  # no field of a pydantic model can have this name
            found.setdefault("overrides_of_model_config", found.pop("model_config"))
        return found


def _asked(values: Any, unsupported: Iterable[str], other_names: Mapping[str, str]) -> Any:
    """A mapping without keys that ask for nothing, and `with_one_name` of each key."""
    if not isinstance(values, dict):
        return values
    nothing = {key: ("",) for key in values.keys() - {"step_separator"}}
    nothing |= dict.fromkeys(unsupported, (None, False, "", [], {}))
    return with_one_name({key: each for key, each in values.items() if each not in nothing.get(key, ())}, other_names)


def with_one_name(values: dict[str, Any], other_names: Mapping[str, str]) -> dict[str, Any]:
    """The values under one name of each key."""
    found = {key: value for key, value in values.items() if key not in other_names}
    for name, key in other_names.items():
        value, given = values.get(name), found.get(key)
        if given in (None, "") and value not in (None, ""):
            found[key] = value
            if name in _FOREIGN:
                warn(f"{name} is read as {key}, its name here.")
        elif value not in (None, "", given):
            warn(f"{name}: {value} has no effect: {key}: {given} is the same key.")
    return found


def _replace_values(found: dict[str, Any]) -> None:
    """Replace values that have another form here, with a warning for each that is not the same."""
    if found.get("float16") and (found.get("bfloat16") or found.get("bf16")):
        warn(f"float16: {found.pop('float16')} has no effect: bfloat16 is set.")
    for (key, value), (other, reason) in _REPLACED.items():
        given = found.get(key)
        if given == value and type(given) is type(value):
            del found[key]
            if not other or any(found.get(name) != new for name, new in other.items()):
                warn(f"{key}: {str(value).lower()} {reason}.")
            found.update(other)
    if found.get("adapter") == "lora" and found.get("load_in_4bit") is True:
        warn("adapter: lora is replaced with adapter: qlora, which is its name with load_in_4bit: true.")
        found["adapter"] = "qlora"
    if isinstance(found.get("tokens"), dict) and found.get("special_tokens") in (None, {}):
        warn("tokens is a mapping, which is read as special_tokens.")
        found["special_tokens"] = found.pop("tokens")


def _of_dataset(entry: Any, run: dict[str, Any]) -> Any:
    """A dataset with the keys of chat templates in place of the older ones of sharegpt, if these do not contradict.
    Without a type, rows of preference methods and prompts are read as they are."""
    if not isinstance(entry := _asked(entry, UNSUPPORTED_IN_DATASETS, {}), dict):
        return entry
    if "path" not in entry and entry.get("data_files") and entry.get("ds_type"):
        entry["path"] = entry["ds_type"]
    if entry.get("type") is None and run.get("rl") in (*_PREFERENCES, *_OF_REWARDS):
        entry["type"] = "passthrough"
    named, known = entry.get("conversation"), _CONVERSATIONS.get(str(entry.get("conversation")))
    template = entry.get("chat_template") or run.get("chat_template") or known
    if None not in (named, template) and template in (named, known):
        entry |= {"chat_template": template, "conversation": None}
    roles = (("user", entry.pop("field_human", None)), ("assistant", entry.pop("field_model", None)))
    return {"roles": {role: [name] for role, name in roles if name} or None, **entry}


# Degrees of parallelism that can only be 1.
SINGLE = {
    "dp_replicate_size": "models are sharded over all processes, or copied to each of them",
    "context_parallel_size": "sequences are not split over processes; lower sequence_len, or shard the model with fsdp",
    "tensor_parallel_size": "layers are not split over processes; shard the model with fsdp "
    "(vllm.tensor_parallel_size is that of a vLLM server)",
    "expert_parallel_size": "experts are not split over processes; shard the model with fsdp",
}
# Plugins of axolotl by the end of their names, and what takes their place.
PLUGINS = {
    "liger.LigerPlugin": "liger_rope, liger_rms_norm, liger_glu_activation and liger_layer_norm are enough in SFT",
    "cut_cross_entropy.CutCrossEntropyPlugin": IN_CHUNKS,
    "kernels.KernelsPlugin": "experts are computed with transformers' own kernels; see experts_implementation",
    "swanlab.SwanLabPlugin": "use_swanlab: true is enough",
    "nemo_gym.NemoGymPlugin": "nemo_gym_enabled: true is enough",
}
UNSUPPORTED_PLUGINS = {
    "spectrum": "list the parameters in unfrozen_parameters",
    "grokfast": "gradients are not filtered",
    "kd": "the loss has no teacher",
    "diffusion": "masked-diffusion models are another class of models, with attention in both directions and another "
    "sampler",
    "llm_compressor": "ebft quantize quantises a trained model",
    "lm_eval": "use ebft evaluate, or lm_eval with the trained model",
    "expert_parallel": "experts are not split over processes; shard the model with fsdp",
    "hatchery": "training runs on this machine",
    "mora": "PEFT's LoRA is the only adapter",
    "densemixer": "the router of the model is used unchanged",
}
