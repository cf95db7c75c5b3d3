"""Keys of axolotl configs that change no result here: the values that describe what happens anyway, and the reason."""

from typing import Any, NamedTuple


class Ignored(NamedTuple):
    """A key without effect: the values that give no warning, and why other values change nothing."""

    harmless: tuple[Any, ...]
    reason: str


IN_CHUNKS = "SFT and strided mode compute the cross-entropy in chunks without it; see chunked_cross_entropy"


def _off(reason: str, *names: str) -> dict[str, Ignored]:
    """Keys whose feature is not used, so that switching it off describes what happens."""
    return dict.fromkeys(names, Ignored((False,), reason))


WITHOUT_EFFECT: dict[str, Ignored] = {
    # Kernels and layers
    **_off(
        "this kernel of Liger is not used; the model's own layers give the same results",
        "liger_rms_norm_gated",
        "liger_use_token_scaling",
    ),
    **_off(
        IN_CHUNKS,
        "cut_cross_entropy",
        "chunked_cross_entropy_num_chunks",
        "liger_cross_entropy",
    ),
    **_off(
        "fused layers of flash-attn are not used; the model's own layers give the same results",
        "flash_attn_cross_entropy",
        "flash_attn_rms_norm",
        "flash_attn_fuse_qkv",
        "flash_attn_fuse_mlp",
        "flash_optimum",
    ),
    **_off(
        "Unsloth's kernels are not used; the model's own layers give the same results",
        "unsloth_cross_entropy_loss",
        "unsloth_lora_mlp",
        "unsloth_lora_qkv",
        "unsloth_lora_o",
        "unsloth_rms_norm",
        "unsloth_rope",
    ),
    **_off(
        "experts are computed with transformers' own kernels; see experts_implementation",
        "use_scattermoe",
        "use_sonicmoe",
        "use_kernels",
    ),
    "flex_attn_compile_kwargs": Ignored((), "the kernel is compiled with PyTorch's defaults"),
    "lora_embedding_kernel": Ignored((False,), "fused adapter kernels are not available; PEFT's layers are used"),
    # Adapters and the model
    "lora_fan_in_fan_out": Ignored((False,), "PEFT determines the layout of the weights for each layer"),
    "peft_autocast_adapter_dtype": Ignored((True,), "the weights of adapters are always float32"),
    "lora_on_cpu": Ignored((False,), "ebft merge-lora reads one part of the weights at a time"),
    "embeddings_skip_upcast": Ignored((False,), "PEFT prepares quantised models"),
    "low_cpu_mem_usage": Ignored((True,), "transformers always reads weights one at a time"),
    "freeze_mm_modules": Ignored((True, False), "only the text model is loaded"),
    "is_falcon_derived_model": Ignored((), "the model family is determined by the model's config"),
    "is_mistral_derived_model": Ignored((), "the model family is determined by the model's config"),
    "is_qwen_derived_model": Ignored((), "the model family is determined by the model's config"),
    "tokenizer_use_fast": Ignored((True,), "transformers only has fast tokenizers for these models"),
    "tokenizer_legacy": Ignored((), "the tokenizer's files determine this"),
    **_off("a model that is quantised with GPTQ is recognised by its files", "gptq", "gptq_groupsize", "gptq_model_v1"),
    "gptq_disable_exllama": Ignored((True, False), "a model that is quantised with GPTQ is recognised by its files"),
    # Data
    "eot_tokens": Ignored((), "the end of a turn is what the chat template writes after its content"),
    "remove_unused_columns": Ignored((True, False), "each method selects the columns that it reads"),
    "dataset_keep_in_memory": Ignored((False,), "datasets maps its files into memory"),
    "shuffle_before_merging_datasets": Ignored((False,), "see shuffle_merged_datasets"),
    "group_by_modality": Ignored((False,), "all rows are text"),
    "sample_packing_group_size": Ignored((), "all documents are packed together, longest first"),
    "sample_packing_bin_size": Ignored((), "a row has as many documents as fit within sequence_len"),
    "sample_packing_eff_est": Ignored((), "the number of packed rows is computed exactly"),
    "sample_packing_sequentially": Ignored((False,), "all documents are packed together, longest first"),
    "sample_packing_mp_start_method": Ignored((), "packing takes one process"),
    "total_num_tokens": Ignored((), "the number of tokens is counted"),
    "total_supervised_tokens": Ignored((), "the number of tokens is counted"),
    "multipack_real_batches": Ignored((), "a packed row counts as one row of micro_batch_size"),
    "pad_to_multiple_of": Ignored((), "batches are padded to their longest row"),
    "push_dataset_to_hub": Ignored((), "prepared rows are stored in dataset_prepared_path only"),
    # Processes, memory and logs
    "ddp_timeout": Ignored((), "the timeout of the launcher applies"),
    "ddp_bucket_cap_mb": Ignored((), "PyTorch's default size of buckets is used"),
    "ddp_broadcast_buffers": Ignored((), "the models have no buffers that change"),
    "gc_steps": Ignored((-1,), "the caching allocator frees memory when it is needed"),
    "gpu_memory_limit": Ignored((), "use device_map to place the model"),
    "include_tokens_per_second": Ignored((True, False), "the throughput is always logged"),
    "include_tkps": Ignored((True, False), "the throughput is always logged"),
    "use_otel_metrics": Ignored((False,), "metrics are written to metrics.jsonl in output_dir"),
    "hf_use_auth_token": Ignored((True, False), "the token of `hf auth login` or of HF_TOKEN is used if there is one"),
    "save_first_step": Ignored((False,), "set save_steps"),
    "do_bench_eval": Ignored((False,), "use ebft evaluate"),
    "do_causal_lm_eval": Ignored((False,), "the cross-entropy and the perplexity of held-out rows are always logged"),
    "eval_causal_lm_metrics": Ignored(
        ([], ["perplexity"]), "the cross-entropy and the perplexity of held-out rows are always logged"
    ),
    "eval_max_new_tokens": Ignored(
        (), "it belongs to eval_table_size; use evaluation.max_new_tokens with ebft evaluate"
    ),
    "generate_samples": Ignored((False,), "rollouts are logged with log_completions"),
    "torchdistx_path": Ignored((), "torchdistx is not used"),
    "device": Ignored((), "the trainer places the model; see device_map"),
}
