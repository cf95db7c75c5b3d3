"""Keys known from other trainers: those that would change the training and are refused, and those of another name."""

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
