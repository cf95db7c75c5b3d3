"""Keys of configs for other trainers: keys without effect, unsupported keys, and keys with a different name here.

A key without effect is accepted without a warning if its value describes what happens here anyway.
"""

from typing import Any, NamedTuple

from pydantic import Field

from ebft.config import rules
from ebft.config.section import Section

_PREPARED = "rows are always prepared: in every run, or once with dataset_prepared_path"
_KERNELS = "fused adapter kernels are not available; PEFT's layers give the same results"
_LIGER = "Liger kernels are not used; the model's own layers give the same results"


class CarriedOverKeys(Section):
    """Keys of configs for other trainers, accepted so that those configs can be loaded."""

    eval_sample_packing: bool | None = Field(
        None, description="No effect: held-out documents are evaluated individually."
    )
    pad_to_sequence_len: bool = Field(False, description="No effect: batches are padded to their longest row.")
    skip_prepare_dataset: bool = Field(False, description="No effect: rows are always prepared.")
    activation_offloading: bool = Field(False, description="No effect: use gradient_checkpointing to save memory.")
    save_safetensors: bool = Field(True, description="No effect: models are always saved as safetensors.")
    fsdp_version: int | None = Field(
        None, description="2, the only supported version. With fsdp_config, it enables fsdp."
    )
    strict: bool = Field(True, description="No effect: unknown keys are always errors.")
    model_type: str | None = Field(
        None,
        description="No effect: the class is determined by the model's config and must be a causal LM.",
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
    liger_rope: bool = Field(False, description="No effect: Liger kernels are not used.")
    liger_rms_norm: bool = Field(False, description="No effect, see liger_rope.")
    liger_glu_activation: bool = Field(False, description="No effect, see liger_rope.")
    liger_layer_norm: bool = Field(False, description="No effect, see liger_rope.")
    liger_fused_linear_cross_entropy: bool = Field(
        False, description="No effect: strided mode already computes its losses in chunks."
    )
    profiler_steps: int | list[int] | None = Field(None, description="No effect: there is no built-in profiler.")


class Ignored(NamedTuple):
    """A key without effect: the values that give no warning, and why other values change nothing."""

    harmless: tuple[Any, ...]
    reason: str


IGNORED: dict[str, Ignored] = {
    "eval_sample_packing": Ignored((False, None), "held-out documents are evaluated individually"),
    "pad_to_sequence_len": Ignored((False,), "batches are padded to their longest row"),
    "skip_prepare_dataset": Ignored((False,), _PREPARED),
    "activation_offloading": Ignored((False,), "use gradient_checkpointing to save memory"),
    "save_safetensors": Ignored((True,), "models are always saved as safetensors"),
    "fsdp_version": Ignored((2,), "fsdp is not set"),
    "strict": Ignored((True, False), "unknown keys are always errors"),
    "model_type": Ignored(("AutoModelForCausalLM",), "the class is determined by the model's config"),
    "tokenizer_type": Ignored(("AutoTokenizer",), "the class is determined by the tokenizer's files"),
    "debug": Ignored((False,), "there is no debug mode; `ebft preprocess --debug` shows rows"),
    "local_rank": Ignored((), "the launcher sets the rank of each process"),
    "is_llama_derived_model": Ignored((), "the model family is determined by the model's config"),
    **dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), Ignored((False,), _KERNELS)),
    **dict.fromkeys(
        (
            "liger_rope",
            "liger_rms_norm",
            "liger_glu_activation",
            "liger_layer_norm",
            "liger_fused_linear_cross_entropy",
        ),
        Ignored((False,), _LIGER),
    ),
    "profiler_steps": Ignored((), "there is no built-in profiler; run the command under torch.profiler"),
}


_REMOVE = "remove it"
_NO_SAMPLING = "remove it; preference methods do not sample"

UNSUPPORTED = {
    "early_stopping_patience": "remove it; load_best_model_at_end: true loads the best checkpoint at the end",
    "neftune_noise_alpha": f"remove it; {rules.NEFTUNE}",
    "eval_table_size": _REMOVE,
    "eval_max_new_tokens": _REMOVE,
    "cosine_min_lr_ratio": "set lr_scheduler: cosine_with_min_lr and lr_scheduler_kwargs: {min_lr_rate: ...}",
    "peft_use_dora": _REMOVE,
    "peft_use_rslora": _REMOVE,
    "peft_layers_to_transform": "select the modules with a regular expression in lora_target_modules",
    "lora_fan_in_fan_out": _REMOVE,
    "relora_steps": _REMOVE,
    "unfrozen_parameters": "train all weights or an adapter instead",
    "roles_to_train": "remove it; only assistant turns are trained on",
    "chat_template_jinja": "set chat_template to the text of the template",
    "s2_attention": _REMOVE,
    "max_prompt_len": "remove it; rows whose prompt and completions do not fit within sequence_len are dropped",
    "dpo_generate_during_eval": _NO_SAMPLING,
    "generate_during_eval": _NO_SAMPLING,
    "rpo_alpha": "set dpo_loss_type: [sigmoid, sft] and dpo_loss_weights: [1.0, alpha]",
    "dpo_norm_loss": "set dpo_loss_type: sigmoid_norm",
    "dpo_use_liger_kernel": f"remove it; {_LIGER}",
    "dpo_padding_free": "remove it; TRL's DPOTrainer pads batches",
    "dpo_use_logits_to_keep": "remove it; TRL only scores the tokens of completions",
}

# Name of a key in other trainers -> its name here.
OTHER_NAMES = {
    "model": "base_model",
    "model_name_or_path": "base_model",
    "train_on_input": "train_on_inputs",
    "max_length": "sequence_len",
    "max_new_tokens": "trl.max_completion_length",
    "max_seq_len": "sequence_len",
    "max_seq_length": "sequence_len",
    "batch_size": "micro_batch_size",
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
    "run_name": "wandb_name",
    "reward_model": "trl.reward_funcs",
    "pretraining_dataset": "datasets",
}
