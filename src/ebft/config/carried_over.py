"""Keys of configs for other trainers: those without effect, each with a reason; those refused; those of other names.

A key without effect is accepted without a warning at its harmless value, which is what happens here anyway.
"""

from typing import Any, NamedTuple

from pydantic import Field

from ebft.config import rules
from ebft.config.section import Section

_PREPARED = "rows are tokenised anew when the run starts"
_KERNELS = "adapters run through PEFT's own layers, with the same results"
_LIGER = "the model's own layers run, with the same results"


class CarriedOverKeys(Section):
    """Keys of configs for other trainers, accepted so that those configs load."""

    eval_sample_packing: bool | None = Field(None, description="Without effect: evaluation is the same either way.")
    pad_to_sequence_len: bool = Field(False, description="Without effect: a batch is as long as its longest row.")
    skip_prepare_dataset: bool = Field(False, description="Without effect: there is no separate preparation.")
    dataset_prepared_path: str | None = Field(None, description="Without effect: rows are tokenised in each run.")
    activation_offloading: bool = Field(
        False, description="Without effect: gradient_checkpointing is how memory is saved here."
    )
    save_safetensors: bool = Field(True, description="Without effect: models are always saved as safetensors.")
    strict: bool = Field(True, description="Without effect: unknown keys are always errors.")
    model_type: str | None = Field(
        None,
        description="Without effect: the class follows from the model's own config, and must be a causal LM.",
    )
    tokenizer_type: str | None = Field(
        None, description="Without effect: the class follows from the tokenizer's files."
    )
    debug: bool = Field(False, description="Without effect: there is no debug mode.")
    local_rank: int | None = Field(None, description="Without effect: the launcher tells each process its rank.")
    is_llama_derived_model: bool | None = Field(
        None, description="Without effect: the family follows from the model's own config."
    )
    lora_mlp_kernel: bool = Field(False, description="Without effect: there are no fused adapter kernels.")
    lora_qkv_kernel: bool = Field(False, description="Without effect, like lora_mlp_kernel.")
    lora_o_kernel: bool = Field(False, description="Without effect, like lora_mlp_kernel.")
    liger_rope: bool = Field(False, description="Without effect: the model's own layers run.")
    liger_rms_norm: bool = Field(False, description="Without effect, like liger_rope.")
    liger_glu_activation: bool = Field(False, description="Without effect, like liger_rope.")
    liger_layer_norm: bool = Field(False, description="Without effect, like liger_rope.")
    liger_fused_linear_cross_entropy: bool = Field(
        False, description="Without effect: strided mode computes its losses in chunks already."
    )
    profiler_steps: int | list[int] | None = Field(None, description="Without effect: there is no profiler.")


class Ignored(NamedTuple):
    """One key without effect: the values that need no word, and why the others change nothing."""

    harmless: tuple[Any, ...]
    reason: str


IGNORED: dict[str, Ignored] = {
    "eval_sample_packing": Ignored((False, None), "held-out documents are measured one by one, packed or not"),
    "pad_to_sequence_len": Ignored((False,), "a batch is padded to its longest row only"),
    "skip_prepare_dataset": Ignored((False,), _PREPARED),
    "dataset_prepared_path": Ignored((), _PREPARED),
    "activation_offloading": Ignored((False,), "gradient_checkpointing is how memory is saved here"),
    "save_safetensors": Ignored((True,), "models are always saved as safetensors"),
    "strict": Ignored((True, False), "unknown keys are always errors"),
    "model_type": Ignored(("AutoModelForCausalLM",), "the model's own config names its class"),
    "tokenizer_type": Ignored(("AutoTokenizer",), "the tokenizer's own files name its class"),
    "debug": Ignored((False,), "there is no debug mode"),
    "local_rank": Ignored((), "the launcher tells each process its rank"),
    "is_llama_derived_model": Ignored((), "the model's own config names its family"),
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
    "profiler_steps": Ignored((), "there is no profiler; run the command under torch.profiler"),
}


_REMOVE = "remove it"

UNSUPPORTED = {
    "plugins": _REMOVE,
    "early_stopping_patience": "remove it; load_best_model_at_end: true ends with the best checkpoint",
    "neftune_noise_alpha": f"remove it; {rules.NEFTUNE}",
    "eval_table_size": _REMOVE,
    "eval_max_new_tokens": _REMOVE,
    "cosine_min_lr_ratio": "set lr_scheduler: cosine_with_min_lr and lr_scheduler_kwargs: {min_lr_rate: ...}",
    "peft_use_dora": _REMOVE,
    "peft_use_rslora": _REMOVE,
    "peft_layers_to_transform": "name the modules in lora_target_modules, as a regular expression",
    "lora_fan_in_fan_out": _REMOVE,
    "relora_steps": _REMOVE,
    "unfrozen_parameters": "train all weights, or an adapter",
    "roles_to_train": "remove it; the assistant's turns are trained on",
    "chat_template_jinja": "write the template itself as chat_template",
    "s2_attention": _REMOVE,
}

# What other trainers call a key -> the key.
OTHER_NAMES = {
    "model": "base_model",
    "model_name_or_path": "base_model",
    "train_on_input": "train_on_inputs",
    "max_length": "sequence_len",
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
    "run_name": "wandb_name",
    "reward_model": "trl.reward_funcs",
    "pretraining_dataset": "datasets",
}
