"""Keys known from configs for other trainers that would change the training, and so are refused rather than ignored."""

_REMOVE = "remove it"

UNSUPPORTED = {
    "plugins": _REMOVE,
    "early_stopping_patience": "remove it; load_best_model_at_end: true ends with the best checkpoint",
    "neftune_noise_alpha": "remove it; noise in the embeddings would make training differ from sampling",
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
