"""Keys of axolotl configs that would change results and are not supported: what to do instead.

A key that is unset or false in a config asks for nothing, and is accepted (`without_unset`).
"""

from typing import Any


def _same(reason: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, reason)


_TEXT_ONLY = "models are trained on text only. Remove it"
_RELORA = (
    "ReLoRA merges the adapter into the base weights during training, so that the result is not an adapter of "
    "base_model. Remove it, or train all weights"
)

REFUSED: dict[str, str] = {
    # Adapters and weights
    **_same(
        _RELORA,
        "relora",
        "relora_steps",
        "relora_warmup_steps",
        "relora_anneal_steps",
        "relora_prune_ratio",
        "relora_cpu_offload",
        "jagged_restart_steps",
        "jagged_restart_warmup_steps",
        "jagged_restart_anneal_steps",
    ),
    "peft": "LoftQ replaces the base weights with quantised ones, so that the result is not an adapter of base_model. "
    "Remove it",
    "peft_trainable_token_indices": "ebft merge-lora merges whole weights. Use lora_modules_to_save: [embed_tokens]",
    "lora_target_linear_modules": "set lora_target_modules",
    **_same("LISA trains other layers in each step. Use unfrozen_parameters", "lisa_n_layers", "lisa_step_interval"),
    **_same("list the parameters in unfrozen_parameters", "spectrum_top_fraction", "spectrum_model_name"),
    "quantize_moe_experts": "experts are loaded in the dtype of the model. Remove it",
    "quantization": "ebft quantize quantises a trained model. Remove it",
    "qat": "torchao's quantisation-aware training has no int8 weights, which ebft quantize writes. Remove it",
    "fp8": "matrix products in 8 bits need a GPU from the H100 on, and change results. Set bf16: true",
    "bfloat16": "set bf16: true, which trains in bfloat16 without mixed precision of weights",
    "float16": "set fp16: true, or bf16: true on GPUs that support it",
    "overrides_of_model_kwargs": "edit a copy of config.json, and name its folder in base_model_config",
    "rope_scaling": "edit a copy of config.json, and name its folder in base_model_config",
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
    **_same(
        _TEXT_ONLY,
        "is_multimodal",
        "processor_type",
        "processor_config",
        "processor_kwargs",
        "image_size",
        "image_resize_algorithm",
        "image_token_id",
        "audio_sampling_rate",
    ),
    # Optimizer, batches, memory
    "cosine_constant_lr_ratio": "transformers has no such schedule. Use lr_scheduler: warmup_stable_decay with "
    "lr_scheduler_kwargs, or cosine_min_lr_ratio alone",
    "optim_target_modules": "it is for galore and apollo, which are not supported. Remove it",
    "adam_beta3": "transformers has no optimizer that reads it. Remove it",
    "adam_epsilon2": "transformers has no optimizer that reads it. Remove it",
    "auto_find_batch_size": "it changes the batch size of a run. `ebft doctor` measures the memory of a step",
    "dataloader_drop_last": "the last rows of an epoch are trained on. Remove it",
    "offload_optimizer": "use deepspeed: zero3_offload or fsdp_config with cpu_offload",
    # Trackers and evaluation
    "comet_api_key": "do not write it into a file. Set the environment variable COMET_API_KEY",
    "bench_dataset": "use ebft evaluate",
    "eval_table_size": "use ebft evaluate, or log_completions of the method",
}


def without_unset(values: dict[str, Any], unsupported: dict[str, str]) -> dict[str, Any]:
    """The keys of a config without unsupported ones that ask for nothing: those that are empty or false."""

    def asks(key: str, value: Any) -> bool:
        return value not in (None, False, "", [], {})

    return {key: value for key, value in values.items() if key not in unsupported or asks(key, value)}


def without_repeated(values: dict[str, Any]) -> dict[str, Any]:
    """The keys of a config without those that repeat the value of another key, under a name that is refused."""
    again = {"bfloat16": "bf16", "float16": "fp16"}
    found = {key: value for key, value in values.items() if key not in again or value != values.get(again[key])}
    for section in ("datasets", "test_datasets"):
        entries = found.get(section)
        if isinstance(entries, list):
            found[section] = [_without_conversation(entry, found.get("chat_template")) for entry in entries]
    return found


def _without_conversation(entry: Any, chat_template: Any) -> Any:
    """A dataset without `conversation`, the name of its chat template in older configs, if the template is the same."""
    if not isinstance(entry, dict) or entry.get("conversation") != (entry.get("chat_template") or chat_template):
        return entry
    return {key: value for key, value in entry.items() if key != "conversation"}
