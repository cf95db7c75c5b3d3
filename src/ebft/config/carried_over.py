"""Keys of configs for other trainers: keys without effect, unsupported keys, and keys with a different name here.

A key without effect is accepted without a warning if its value describes what happens here anyway.
"""

from typing import Any

from pydantic import Field, create_model, model_validator

from ebft.config.refused import REFUSED, without_repeated, without_unset
from ebft.config.section import Section
from ebft.config.without_effect import IN_CHUNKS, WITHOUT_EFFECT, Ignored

_PREPARED = "rows are always prepared: in every run, or once with dataset_prepared_path"
_KERNELS = "fused adapter kernels are not available; PEFT's layers give the same results"
# Those that a method trains; others are refused.
_CLASSES = ("AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoModelForTokenClassification")


KeysWithoutEffect: type[Section] = create_model(
    "KeysWithoutEffect",
    __base__=Section,
    __module__=__name__,
    **{key: (Any, Field(None, description=f"No effect: {why.reason}.")) for key, why in WITHOUT_EFFECT.items()},
)


class CarriedOverKeys(KeysWithoutEffect):
    """Keys of configs for other trainers, accepted so that those configs can be loaded."""

    pad_to_sequence_len: bool = Field(False, description="No effect: batches are padded to their longest row.")
    skip_prepare_dataset: bool = Field(False, description="No effect: rows are always prepared.")
    save_safetensors: bool = Field(True, description="No effect: models are always saved as safetensors.")
    fsdp_version: int | None = Field(
        None, description="2, the only supported version. With fsdp_config, it enables fsdp."
    )
    strict: bool = Field(True, description="No effect: unknown keys are always errors.")
    model_type: str | None = Field(
        None,
        description="No effect: the class is determined by the model's config and the method, which it must match.",
    )
    tokenizer_type: str | None = Field(None, description="No effect: the class is determined by the tokenizer's files.")
    debug: bool = Field(False, description="No effect: `ebft preprocess --debug` shows rows.")
    local_rank: int | None = Field(None, description="No effect: the launcher sets the rank of each process.")
    is_llama_derived_model: bool | None = Field(
        None, description="No effect: the model family is determined by the model's config."
    )
    lora_mlp_kernel: bool = Field(False, description="No effect: fused adapter kernels are not available.")
    lora_qkv_kernel: bool = Field(False, description="No effect, see lora_mlp_kernel.")
    lora_o_kernel: bool = Field(False, description="No effect, see lora_mlp_kernel.")
    liger_fused_linear_cross_entropy: bool = Field(False, description="No effect: see chunked_cross_entropy.")
    profiler_steps: int | list[int] | None = Field(None, description="No effect: there is no built-in profiler.")

    @model_validator(mode="before")
    @classmethod
    def _unset_asks_for_nothing(cls, data: Any) -> Any:
        """Accept unsupported keys that are empty or false, as configs for other trainers list them."""
        if not isinstance(data, dict):
            return data
        found = without_repeated(without_unset(data, UNSUPPORTED))
        if "model_config" in found:  # no field of a pydantic model can have this name
            found.setdefault("overrides_of_model_config", found.pop("model_config"))
        return found


IGNORED: dict[str, Ignored] = {
    **WITHOUT_EFFECT,
    "pad_to_sequence_len": Ignored((False,), "batches are padded to their longest row"),
    "skip_prepare_dataset": Ignored((False,), _PREPARED),
    "save_safetensors": Ignored((True,), "models are always saved as safetensors"),
    "fsdp_version": Ignored((2,), "fsdp is not set"),
    "strict": Ignored((True, False), "unknown keys are always errors"),
    "model_type": Ignored(_CLASSES, "the class is determined by the model's config"),
    "tokenizer_type": Ignored(("AutoTokenizer",), "the class is determined by the tokenizer's files"),
    "debug": Ignored((False,), "there is no debug mode; `ebft preprocess --debug` shows rows"),
    "local_rank": Ignored((), "the launcher sets the rank of each process"),
    "is_llama_derived_model": Ignored((), "the model family is determined by the model's config"),
    **dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), Ignored((False,), _KERNELS)),
    "liger_fused_linear_cross_entropy": Ignored((False,), IN_CHUNKS),
    "profiler_steps": Ignored((), "there is no built-in profiler; run the command under torch.profiler"),
}


_NO_SAMPLING = "remove it; preference methods do not sample"
_REFERENCE = "the reference model is base_model, or the adapter of lora_model_dir as it is loaded"

UNSUPPORTED = {
    **REFUSED,
    "dataset_shard_num": "set shards of the datasets",
    "dataset_shard_idx": "set shards_idx of the datasets",
    "max_prompt_len": "remove it; rows whose prompt and completions do not fit within sequence_len are dropped",
    "dpo_generate_during_eval": _NO_SAMPLING,
    "generate_during_eval": _NO_SAMPLING,
    "rpo_alpha": "set dpo_loss_type: [sigmoid, sft] and dpo_loss_weights: [1.0, alpha]",
    "dpo_norm_loss": "set dpo_loss_type: sigmoid_norm",
    "dpo_use_liger_kernel": "remove it; TRL computes the log-probabilities in chunks without it",
    "dpo_padding_free": "remove it; TRL's DPOTrainer pads batches",
    "dpo_use_logits_to_keep": "remove it; logits are only computed for tokens of completions, in chunks",
    "rl_adapter_ref_model": f"remove it; {_REFERENCE}",
    "ref_model": f"remove it; {_REFERENCE}",
}

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
