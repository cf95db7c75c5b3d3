"""Keys of configs for axolotl and other trainers, in tables: key, harmless values, reason.

A key without effect is accepted without a warning if its value describes what happens here anyway. Unsupported keys are
errors, unless they are empty or false. Other keys have another name here.
"""

from typing import Any, NamedTuple

from pydantic import Field, create_model, model_validator

from ebft.config.section import Section

IN_CHUNKS = "SFT and strided mode compute the cross-entropy in chunks without it; see chunked_cross_entropy"
# Those that a method trains; others are refused.
_CLASSES = ("AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoModelForTokenClassification")

# Names -> what to do instead.
_UNSUPPORTED = {
    # Adapters and weights
    "relora relora_steps relora_warmup_steps relora_anneal_steps relora_prune_ratio relora_cpu_offload "
    "jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps": "ReLoRA merges the adapter into "
    "the base weights during training, so that the result is not an adapter of base_model. Remove it, or train all "
    "weights",
    "peft": "LoftQ replaces the base weights with quantised ones, so that the result is not an adapter of base_model. "
    "Remove it",
    "peft_trainable_token_indices": "ebft merge-lora merges whole weights. Use lora_modules_to_save: [embed_tokens]",
    "lora_target_linear_modules": "set lora_target_modules",
    "lisa_n_layers lisa_step_interval": "LISA trains other layers in each step. Use unfrozen_parameters",
    "spectrum_top_fraction spectrum_model_name": "list the parameters in unfrozen_parameters",
    "quantization": "ebft quantize quantises a trained model. Remove it",
    "qat": "torchao's quantisation-aware training has no int8 weights, which ebft quantize writes. Remove it",
    "fp8": "matrix products in 8 bits need a GPU from the H100 on, and change results. Set bf16: true",
    "bfloat16": "set bf16: true, which trains in bfloat16 without mixed precision of weights",
    "float16": "set fp16: true, or bf16: true on GPUs that support it",
    "overrides_of_model_kwargs rope_scaling": "edit a copy of config.json, and name its folder in base_model_config",
    "fix_untrained_tokens": "it changes the base weights before training. List new tokens in tokens",
    # Attention
    "s2_attention": "shifted sparse attention differs from the model's own attention. Remove it",
    "sage_attention": "quantised attention differs from the model's own attention. Set attn_implementation: sdpa",
    # Data
    "default_system_message": "set system_prompt of the datasets, or write it into the text of chat_template",
    "curriculum_sampling": "rows are shuffled. Sort them, and use shuffle_merged_datasets: false",
    "use_pose": "positions are those of the document. Remove it",
    "dispatch_batches": "every process reads the whole stream. Remove it",
    "split_batches": "micro_batch_size is that of a process. Remove it",
    "accelerator_config": "batches are split by the method. Remove it",
    "is_multimodal processor_type processor_config processor_kwargs image_size image_resize_algorithm "
    "image_token_id audio_sampling_rate": "models are trained on text only. Remove it",
    # Optimizer, batches, memory
    "cosine_constant_lr_ratio": "transformers has no such schedule. Use lr_scheduler: warmup_stable_decay with "
    "lr_scheduler_kwargs, or cosine_min_lr_ratio alone",
    "optim_target_modules": "it is for galore and apollo, which are not supported. Remove it",
    "adam_beta3 adam_epsilon2": "transformers has no optimizer that reads it. Remove it",
    "auto_find_batch_size": "it changes the batch size of a run. `ebft doctor` measures the memory of a step",
    "dataloader_drop_last": "the last rows of an epoch are trained on. Remove it",
    "offload_optimizer": "use deepspeed: zero3_offload or fsdp_config with cpu_offload",
    # Trackers and evaluation
    "comet_api_key": "do not write it into a file. Set the environment variable COMET_API_KEY",
    "bench_dataset": "use ebft evaluate",
    "eval_table_size": "use ebft evaluate, or log_completions of the method",
    "dataset_shard_num": "set shards of the datasets",
    "dataset_shard_idx": "set shards_idx of the datasets",
    "max_prompt_len": "remove it; rows whose prompt and completions do not fit within sequence_len are dropped",
    "dpo_generate_during_eval generate_during_eval": "remove it; preference methods do not sample",
    "rpo_alpha": "set dpo_loss_type: [sigmoid, sft] and dpo_loss_weights: [1.0, alpha]",
    "dpo_norm_loss": "set dpo_loss_type: sigmoid_norm",
    "dpo_use_liger_kernel": "remove it; TRL computes the log-probabilities in chunks without it",
    "dpo_padding_free": "remove it; TRL's DPOTrainer pads batches",
    "dpo_use_logits_to_keep": "remove it; logits are only computed for tokens of completions, in chunks",
    "rl_adapter_ref_model ref_model": "remove it; the reference model is base_model, or the adapter of lora_model_dir "
    "as it is loaded",
}
UNSUPPORTED_KEYS = {name: reason for names, reason in _UNSUPPORTED.items() for name in names.split()}

# Keys of an element of datasets.
UNSUPPORTED_IN_DATASETS = {
    "conversation": "set chat_template of the config",
    "chat_template_jinja": "set chat_template of the config to the text of the template",
    "message_field_training_detail": "use message_field_training, and split a turn that is trained on in part",
    "field_human": "use message_property_mappings and roles",
    "field_model": "use message_property_mappings and roles",
    "input_format": "set type to a mapping with format",
    "input_transform": "use a custom transform as type",
    "text_column": "set field",
}

# Name of a key in other trainers -> its name here.
OTHER_NAMES = {
    "model": "base_model",
    "model_name_or_path": "base_model",
    "train_on_input": "train_on_inputs",
    "max_length": "sequence_len",
    "model_revision": "revision_of_model",
    "dataset_processes": "dataset_num_proc",
    "noisy_embedding_alpha": "neftune_noise_alpha",
    "sequence_parallel_degree": "context_parallel_size",
    "mlflow_run_name": "wandb_name",
    "max_new_tokens": "trl.max_completion_length",
    "max_seq_len": "sequence_len",
    "max_seq_length": "sequence_len",
    "per_device_train_batch_size": "micro_batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "epochs": "num_epochs",
    "num_train_epochs": "num_epochs",
    "lr": "learning_rate",
    "lr_scheduler_type": "lr_scheduler",
    "optim": "optimizer",
    "lora_rank": "lora_r",
    "lora_target": "lora_target_modules",
    "lora_targets": "lora_target_modules",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "dpo_beta": "rl_beta",
    "kto_beta": "rl_beta",
    "orpo_beta": "rl_beta",
    "simpo_beta": "rl_beta",
    "run_name": "wandb_name",
}


class Ignored(NamedTuple):
    """A key without effect: the values that give no warning, why other values change nothing, and what it accepts."""

    harmless: tuple[Any, ...]
    reason: str
    type: Any = Any


# Names, harmless values, reason; those with a type accept no other values. The default of a boolean is harmless.
_IGNORED = (
    # Kernels and layers
    (
        "liger_rms_norm_gated liger_use_token_scaling",
        (False,),
        "this kernel of Liger is not used; the model's own layers give the same results",
    ),
    ("cut_cross_entropy chunked_cross_entropy_num_chunks liger_cross_entropy", (False,), IN_CHUNKS),
    (
        "flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_qkv flash_attn_fuse_mlp flash_optimum",
        (False,),
        "fused layers of flash-attn are not used; the model's own layers give the same results",
    ),
    (
        "unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o unsloth_rms_norm unsloth_rope",
        (False,),
        "Unsloth's kernels are not used; the model's own layers give the same results",
    ),
    (
        "use_scattermoe use_sonicmoe use_kernels",
        (False,),
        "experts are computed with transformers' own kernels; see experts_implementation",
    ),
    ("flex_attn_compile_kwargs", (), "the kernel is compiled with PyTorch's defaults"),
    ("lora_embedding_kernel", (False,), "fused adapter kernels are not available; PEFT's layers are used"),
    # Adapters and the model
    ("lora_fan_in_fan_out", (False,), "PEFT determines the layout of the weights for each layer"),
    ("peft_autocast_adapter_dtype", (True,), "the weights of adapters are always float32"),
    ("lora_on_cpu", (False,), "ebft merge-lora reads one part of the weights at a time"),
    ("embeddings_skip_upcast", (False,), "PEFT prepares quantised models"),
    ("low_cpu_mem_usage", (True,), "transformers always reads weights one at a time"),
    ("freeze_mm_modules", (True, False), "only the text model is loaded"),
    (
        "is_falcon_derived_model is_mistral_derived_model is_qwen_derived_model",
        (),
        "the model family is determined by the model's config",
    ),
    ("tokenizer_use_fast", (True,), "transformers only has fast tokenizers for these models"),
    ("tokenizer_legacy", (), "the tokenizer's files determine this"),
    ("gptq gptq_groupsize gptq_model_v1", (False,), "a model that is quantised with GPTQ is recognised by its files"),
    ("gptq_disable_exllama", (True, False), "a model that is quantised with GPTQ is recognised by its files"),
    # Data
    ("eot_tokens", (), "the end of a turn is what the chat template writes after its content"),
    ("remove_unused_columns", (True, False), "each method selects the columns that it reads"),
    ("dataset_keep_in_memory", (False,), "datasets maps its files into memory"),
    ("shuffle_before_merging_datasets", (False,), "see shuffle_merged_datasets"),
    ("group_by_modality", (False,), "all rows are text"),
    ("sample_packing_group_size", (), "all documents are packed together, longest first"),
    ("sample_packing_bin_size", (), "a row has as many documents as fit within sequence_len"),
    ("sample_packing_eff_est", (), "the number of packed rows is computed exactly"),
    ("sample_packing_sequentially", (False,), "all documents are packed together, longest first"),
    ("sample_packing_mp_start_method", (), "packing takes one process"),
    ("total_num_tokens total_supervised_tokens", (), "the number of tokens is counted"),
    ("multipack_real_batches", (), "a packed row counts as one row of micro_batch_size"),
    ("pad_to_multiple_of", (), "batches are padded to their longest row"),
    ("push_dataset_to_hub", (), "prepared rows are stored in dataset_prepared_path only"),
    # Processes, memory and logs
    ("ddp_timeout", (), "the timeout of the launcher applies"),
    ("ddp_bucket_cap_mb", (), "PyTorch's default size of buckets is used"),
    ("ddp_broadcast_buffers", (), "the models have no buffers that change"),
    ("gc_steps", (-1,), "the caching allocator frees memory when it is needed"),
    ("gpu_memory_limit", (), "use device_map to place the model"),
    ("include_tokens_per_second include_tkps", (True, False), "the throughput is always logged"),
    ("use_otel_metrics", (False,), "metrics are written to metrics.jsonl in output_dir"),
    ("hf_use_auth_token", (True, False), "the token of `hf auth login` or of HF_TOKEN is used if there is one"),
    ("save_first_step", (False,), "set save_steps"),
    ("do_bench_eval", (False,), "use ebft evaluate"),
    ("do_causal_lm_eval", (False,), "the cross-entropy and the perplexity of held-out rows are always logged"),
    (
        "eval_causal_lm_metrics",
        ([], ["perplexity"]),
        "the cross-entropy and the perplexity of held-out rows are always logged",
    ),
    ("eval_max_new_tokens", (), "it belongs to eval_table_size; use evaluation.max_new_tokens with ebft evaluate"),
    ("generate_samples", (False,), "rollouts are logged with log_completions"),
    ("torchdistx_path", (), "torchdistx is not used"),
    ("device", (), "the trainer places the model; see device_map"),
    # Keys with a type
    ("pad_to_sequence_len", (False,), "batches are padded to their longest row", bool),
    (
        "skip_prepare_dataset",
        (False,),
        "rows are always prepared: in every run, or once with dataset_prepared_path",
        bool,
    ),
    ("save_safetensors", (True,), "models are always saved as safetensors", bool),
    ("fsdp_version", (2,), "fsdp is not set", int | None),
    ("strict", (True, False), "unknown keys are always errors", bool),
    ("model_type", _CLASSES, "the class is determined by the model's config", str | None),
    ("tokenizer_type", ("AutoTokenizer",), "the class is determined by the tokenizer's files", str | None),
    ("debug", (False,), "there is no debug mode; `ebft preprocess --debug` shows rows", bool),
    ("local_rank", (), "the launcher sets the rank of each process", int | None),
    ("is_llama_derived_model", (), "the model family is determined by the model's config", bool | None),
    (
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel",
        (False,),
        "fused adapter kernels are not available; PEFT's layers give the same results",
        bool,
    ),
    ("liger_fused_linear_cross_entropy", (False,), IN_CHUNKS, bool),
)
IGNORED_KEYS = {name: Ignored(*rest) for names, *rest in _IGNORED for name in names.split()}
UNTYPED = [name for name, ignored in IGNORED_KEYS.items() if ignored.type is Any]
# Of keys that have an effect beside others.
_DESCRIPTIONS = {
    "fsdp_version": "2, the only supported version. With fsdp_config, it enables fsdp.",
    "model_type": "No effect: the class is determined by the model's config and the method, which it must match.",
}


def _field(name: str) -> tuple[Any, Any]:
    harmless, reason, accepted = IGNORED_KEYS[name]
    default = harmless[0] if accepted is bool else None
    return accepted, Field(default, description=_DESCRIPTIONS.get(name, f"No effect: {reason}."))


_IgnoredKeys: type[Section] = create_model(
    "_IgnoredKeys", __base__=Section, __module__=__name__, **{name: _field(name) for name in IGNORED_KEYS}
)


class CarriedOverKeys(_IgnoredKeys):
    """Keys of configs for other trainers, accepted so that those configs can be loaded."""

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_for_nothing(cls, data: Any) -> Any:
        """Accept unsupported keys that are empty or false, or repeat another key, as configs for other trainers do."""
        if not isinstance(data, dict):
            return data
        again = {"bfloat16": "bf16", "float16": "fp16"}
        asks = lambda key, value: key not in UNSUPPORTED_KEYS or value not in (None, False, "", [], {})
        repeats = lambda key, value: key in again and value == data.get(again[key])
        found = {key: value for key, value in data.items() if asks(key, value) and not repeats(key, value)}
        for section in ("datasets", "test_datasets"):
            if isinstance(found.get(section), list):
                found[section] = [_without_conversation(each, found.get("chat_template")) for each in found[section]]
        if "model_config" in found:  # no field of a pydantic model can have this name
            found.setdefault("overrides_of_model_config", found.pop("model_config"))
        return found


def _without_conversation(entry: Any, chat_template: Any) -> Any:
    """A dataset without `conversation`, the name of its chat template in older configs, if the template is the same."""
    if not isinstance(entry, dict) or entry.get("conversation") != (entry.get("chat_template") or chat_template):
        return entry
    return {key: value for key, value in entry.items() if key != "conversation"}


# Degrees of parallelism that can only be 1.
SINGLE = {
    "dp_replicate_size": "models are sharded over all processes, or copied to each of them",
    "context_parallel_size": "sequences are not split over processes; lower sequence_len, or shard the model with fsdp",
    "tensor_parallel_size": "layers are not split over processes; shard the model with fsdp "
    "(vllm.tensor_parallel_size is that of a vLLM server)",
    "expert_parallel_size": "experts are not split over processes; shard the model with fsdp",
}
# Values of bnb_config_kwargs that describe how weights are quantised.
BITSANDBYTES = {
    "llm_int8_has_fp16_weight": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "load_in_4bit": True,
    "load_in_8bit": True,
}
# Plugins of axolotl by the end of their names, and what takes their place.
PLUGINS = {
    "liger.LigerPlugin": "liger_rope, liger_rms_norm, liger_glu_activation and liger_layer_norm are enough in SFT",
    "cut_cross_entropy.CutCrossEntropyPlugin": IN_CHUNKS,
    "kernels.KernelsPlugin": "experts are computed with transformers' own kernels; see experts_implementation",
    "nemo_gym.NemoGymPlugin": "nemo_gym_enabled: true is enough",
}
UNSUPPORTED_PLUGINS = {
    "spectrum": "list the parameters in unfrozen_parameters",
    "grokfast": "gradients are not filtered",
    "kd": "the loss has no teacher",
    "diffusion": "models are trained on the next token",
    "llm_compressor": "ebft quantize quantises a trained model",
    "lm_eval": "use ebft evaluate, or lm_eval with the trained model",
    "densemixer": "the router of the model is used unchanged",
}
