"""Configs of the kinds that axolotl's examples have, written from the format, as parts that are put together."""

from typing import Any

import pytest

from ebft.config.schema import RunConfig
from tests.config.conftest import warned

# Groups of keys that most configs share, in the spelling of axolotl; those that are listed without a value are None.
COMMON = {"strict": False, "val_set_size": 0.05, "output_dir": "./outputs/out", "sequence_len": 4096,
          "sample_packing": True, "eval_sample_packing": False, "pad_to_sequence_len": True, "wandb_project": None,
          "wandb_entity": None, "wandb_watch": None, "wandb_name": None, "wandb_log_model": None,
          "gradient_accumulation_steps": 4, "micro_batch_size": 2, "num_epochs": 3, "train_on_inputs": False,
          "group_by_length": False, "bf16": "auto", "fp16": None, "tf32": False, "gradient_checkpointing": True,
          "early_stopping_patience": None, "resume_from_checkpoint": None, "local_rank": None, "logging_steps": 1,
          "xformers_attention": None, "flash_attention": True, "s2_attention": None, "loss_watchdog_threshold": 5.0,
          "loss_watchdog_patience": 3, "warmup_steps": 10, "evals_per_epoch": 4, "eval_table_size": None,
          "eval_max_new_tokens": 128, "saves_per_epoch": 1, "debug": None, "deepspeed": None, "weight_decay": 0.0,
          "fsdp": None, "fsdp_config": None}  # fmt: skip
CHAT = {"chat_template": "chatml", "datasets": [{"path": "mlabonne/FineTome-100k", "type": "chat_template",
                                                 "split": "train[:20%]", "field_messages": "conversations"}],
        "dataset_prepared_path": "last_run_prepared"}  # fmt: skip
COMPLETION = {"datasets": [{"path": "allenai/c4", "name": "en", "type": "completion", "field": "text"}],
              "dataset_prepared_path": None}  # fmt: skip
LORA = {"load_in_8bit": True, "load_in_4bit": False, "adapter": "lora", "lora_model_dir": None, "lora_r": 32,
        "lora_alpha": 16, "lora_dropout": 0.05, "lora_target_linear": True, "lora_fan_in_fan_out": None}  # fmt: skip
QLORA = {"load_in_8bit": False, "load_in_4bit": True, "adapter": "qlora", "lora_model_dir": None, "lora_r": 32,
         "lora_alpha": 16, "lora_dropout": 0.05, "lora_target_modules": None, "lora_target_linear": True,
         "lora_fan_in_fan_out": None}  # fmt: skip
FFT = {"load_in_8bit": False, "load_in_4bit": False}
ADAM_8BIT = {"optimizer": "adamw_bnb_8bit", "lr_scheduler": "cosine", "learning_rate": 0.0002}
FUSED = {"optimizer": "adamw_torch_fused", "lr_scheduler": "cosine", "learning_rate": 2e-05}
LIGER = {"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_rope": True, "liger_rms_norm": True,
         "liger_glu_activation": True, "liger_fused_linear_cross_entropy": True}  # fmt: skip
KERNELS = {"lora_mlp_kernel": True, "lora_qkv_kernel": True, "lora_o_kernel": True}
FSDP1 = {"fsdp": ["full_shard", "auto_wrap"], "fsdp_config": {
    "fsdp_limit_all_gathers": True, "fsdp_sync_module_states": True, "fsdp_offload_params": False,
    "fsdp_use_orig_params": False, "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_sharding_strategy": "FULL_SHARD"
}}  # fmt: skip
FSDP2 = {"fsdp_version": 2, "fsdp_config": {"offload_params": False, "cpu_ram_efficient_loading": True,
                                            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                                            "transformer_layer_cls_to_wrap": "Qwen3DecoderLayer",
                                            "state_dict_type": "FULL_STATE_DICT",
                                            "reshard_after_forward": True}}  # fmt: skip

# Name -> (base model, parts, keys of its own, of which those that replace a key of a part win).
CONFIGS: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "llama-3 lora 8b": ("NousResearch/Meta-Llama-3-8B-Instruct", [CHAT, LORA, ADAM_8BIT],
                        {"chat_template": "llama3", "special_tokens": {"pad_token": "<|end_of_text|>"},
                         "lora_modules_to_save": ["embed_tokens", "lm_head"]}),
    "llama-3 qlora fsdp 70b": ("casperhansen/llama-3-70b-fp16", [CHAT, QLORA, FUSED, FSDP1],
                               {"gradient_checkpointing_kwargs": {"use_reentrant": True}}),
    "llama-3 unfrozen layers": ("NousResearch/Llama-3.2-1B", [CHAT, FFT, FUSED],
                                {"unfrozen_parameters": ["^lm_head.weight$", "model.layers.1[4-5].mlp"],
                                 "deepspeed": "deepspeed_configs/zero2.json"}),
    "pretraining on text": ("TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T", [COMPLETION, FFT, FUSED], {
        "max_steps": 200, "model_type": "LlamaForCausalLM", "tokenizer_type": "LlamaTokenizer"
    }),
    "mistral fft with noise": ("mistralai/Mistral-7B-v0.1", [CHAT, FFT, FUSED], {
        "neftune_noise_alpha": 5, "cosine_min_lr_ratio": 0.1, "warmup_ratio": 0.05, "warmup_steps": None,
        "is_mistral_derived_model": True
    }),
    "mixtral qlora": ("mistralai/Mixtral-8x7B-v0.1", [CHAT, QLORA, ADAM_8BIT], {
        "trust_remote_code": True, "model_config": {"output_router_logits": True, "router_aux_loss_coef": 0.02},
        "lora_dropout": 0.0, "bnb_config_kwargs": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    }),
    "qwen2.5 fft with liger": ("Qwen/Qwen2.5-7B", [CHAT, FFT, LIGER, FUSED],
                               {"chat_template": "qwen_25", "torch_compile": "auto"}),
    "qwen3 moe with experts": ("Qwen/Qwen3-30B-A3B", [CHAT, LORA, KERNELS, FUSED, FSDP2], {
        "plugins": ["axolotl.integrations.kernels.KernelsPlugin"], "use_kernels": True, "use_scattermoe": True,
        "load_in_8bit": False, "lora_target_linear": None, "lora_target_modules": ["q_proj", "v_proj"],
        "experts_implementation": "grouped_mm", "dp_shard_size": 8, "tensor_parallel_size": 1
    }),
    "falcon lora": ("tiiuae/falcon-7b", [CHAT, LORA, ADAM_8BIT], {
        "xformers_attention": True, "flash_attention": None, "gptq_groupsize": None, "lora_fan_in_fan_out": True,
        "tokens": ["<think>"], "shrink_embeddings": True, "early_stopping_patience": 3, "use_tensorboard": True
    }),
}  # fmt: skip


def values_of(name):
    """The keys of a config; those of a later part, and at last its own, replace earlier ones."""
    base_model, parts, own = CONFIGS[name]
    values = {"base_model": base_model}
    for keys in (COMMON, *parts, own):
        plugins = [*values.get("plugins", []), *keys.get("plugins", [])]
        values |= {**keys, **({"plugins": plugins} if plugins else {})}
    return values


@pytest.mark.parametrize("name", CONFIGS)
def test_it_loads_and_every_warning_names_a_key(name):
    config, messages = warned(RunConfig.from_dict, values=values_of(name))
    assert config.method.name.startswith("SFT") and config.base_model == CONFIGS[name][0]
    for message in messages:
        assert message.partition(":")[0].split(",")[0] in values_of(name)
