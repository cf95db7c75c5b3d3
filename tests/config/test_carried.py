"""Configs of the kinds that axolotl's examples have, written from the format, as parts that are put together: each
loads, or is refused with the reason."""

import warnings
from typing import Any

import pytest

from ebft.errors import ConfigError
from ebft.run.config.schema import load_config

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
    "llama-3.2 lora 1b with kernels": ("NousResearch/Llama-3.2-1B", [CHAT, LORA, KERNELS, FUSED],
                                       {"load_in_8bit": False}),
    "llama-3.2 rslora with dora": ("NousResearch/Llama-3.2-1B", [CHAT, LORA, FUSED],
                                   {"peft_use_rslora": True, "peft_use_dora": True, "load_in_8bit": False}),
    "llama-3 unfrozen layers": ("NousResearch/Llama-3.2-1B", [CHAT, FFT, FUSED],
                                {"unfrozen_parameters": ["^lm_head.weight$", "model.layers.1[4-5].mlp"]}),
    "llama-3 deepspeed": ("NousResearch/Llama-3.2-1B", [CHAT, FFT, FUSED],
                          {"deepspeed": "deepspeed_configs/zero2.json"}),
    "tinyllama pretraining on text": ("TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T", [COMPLETION, FFT, FUSED], {
        "max_steps": 200, "model_type": "LlamaForCausalLM", "tokenizer_type": "LlamaTokenizer"
    }),
    "mistral lora": ("mistralai/Mistral-7B-v0.1", [CHAT, LORA, ADAM_8BIT],
                     {"lora_target_linear": False,
                      "lora_target_modules": ["gate_proj", "down_proj", "up_proj", "q_proj", "v_proj", "k_proj"],
                      "model_type": "MistralForCausalLM", "is_mistral_derived_model": True}),
    "mistral fft with noise": ("mistralai/Mistral-7B-v0.1", [CHAT, FFT, FUSED], {
        "neftune_noise_alpha": 5, "cosine_min_lr_ratio": 0.1, "warmup_ratio": 0.05, "warmup_steps": None
    }),
    "mixtral qlora": ("mistralai/Mixtral-8x7B-v0.1", [CHAT, QLORA, ADAM_8BIT],
                      {"trust_remote_code": True, "model_config": {"output_router_logits": True}, "lora_dropout": 0.0}),
    "mixtral fft with router loss": ("mistralai/Mixtral-8x7B-v0.1", [CHAT, FFT, FUSED], {"overrides_of_model_config": {
        "output_router_logits": True, "router_aux_loss_coef": 0.02
    }, "deepspeed": "deepspeed_configs/zero3.json"}),
    "qwen2.5 fft with liger": ("Qwen/Qwen2.5-7B", [CHAT, FFT, LIGER, FUSED],
                               {"chat_template": "qwen_25", "torch_compile": "auto"}),
    "qwen3 qlora with fsdp 2": ("Qwen/Qwen3-8B", [CHAT, QLORA, FUSED, FSDP2],
                                {"chat_template": "qwen3", "gradient_checkpointing": True, "evals_per_epoch": 0}),
    "qwen3 moe with experts": ("Qwen/Qwen3-30B-A3B", [CHAT, LORA, FUSED],
                               {"plugins": ["axolotl.integrations.kernels.KernelsPlugin"], "use_kernels": True,
                                "use_scattermoe": True, "load_in_8bit": False, "lora_dropout": 0.0,
                                "lora_target_linear": False, "lora_target_modules": ["q_proj", "v_proj"],
                                "lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    "qwen3 moe with grouped products": ("Qwen/Qwen3-30B-A3B", [CHAT, FFT, FUSED, FSDP2],
                                        {"experts_implementation": "grouped_mm", "dp_shard_size": 8,
                                         "tensor_parallel_size": 1, "context_parallel_size": 1}),
    "gemma 2 qlora": ("google/gemma-2-9b", [CHAT, QLORA, ADAM_8BIT],
                      {"chat_template": "gemma", "eager_attention": True, "flash_attention": None}),
    "phi-3 fft": ("microsoft/Phi-3-mini-4k-instruct", [CHAT, FFT, FUSED], {"chat_template": "phi_3", "adam_beta2": 0.95,
                                                                           "adam_epsilon": 1e-05, "max_grad_norm": 1.0,
                                                                           "resize_token_embeddings_to_32x": True}),
    "gpt-oss lora with experts": ("openai/gpt-oss-20b", [CHAT, LORA, FUSED], {
        "load_in_8bit": False, "lora_dropout": 0.0, "lora_target_linear": None,
        "lora_target_modules": ["q_proj", "k_proj", "v_proj"], "lora_target_parameters": ["mlp.experts.gate_up_proj"],
        "attn_implementation": "kernels-community/vllm-flash-attn3", "flash_attention": None,
        "chat_template": "tokenizer_default", "use_tensorboard": True
    }),
    "falcon lora": ("tiiuae/falcon-7b", [CHAT, LORA, ADAM_8BIT], {"xformers_attention": True, "flash_attention": None,
                                                                  "is_falcon_derived_model": True,
                                                                  "gptq_groupsize": None, "gptq_model_v1": None}),
    "pythia lora": ("EleutherAI/pythia-1.4b-deduped", [COMPLETION, LORA, FUSED],
                    {"lora_target_linear": None, "lora_target_modules": ["query_key_value"],
                     "lora_fan_in_fan_out": True, "gptq": False}),
    "olmo fft with new tokens": ("allenai/OLMo-2-1124-7B", [CHAT, FFT, FUSED], {
        "tokens": ["<think>", "</think>"], "special_tokens": {"additional_special_tokens": ["<tool>"]},
        "shrink_embeddings": True
    }),
    "smollm3 with early stopping": ("HuggingFaceTB/SmolLM3-3B", [CHAT, QLORA, FUSED], {
        "early_stopping_patience": 3, "load_best_model_at_end": True, "chat_template": "smollm3",
        "bnb_config_kwargs": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    }),
    "llama-3 relora": ("NousResearch/Llama-3.2-1B", [CHAT, LORA, FUSED], {"relora": True, "relora_prune_ratio": 0.9}),
    "llama-3 loftq": ("NousResearch/Llama-3.2-1B", [CHAT, LORA, FUSED], {"peft": {"loftq_config": {"loftq_bits": 4}}}),
    "llama-3 context parallel": ("NousResearch/Llama-3.2-1B", [CHAT, FFT, FUSED], {"context_parallel_size": 4}),
    "llama-3 vision": ("alpindale/Llama-3.2-11B-Vision-Instruct", [CHAT, LORA, FUSED], {
        "processor_type": "AutoProcessor", "skip_prepare_dataset": True, "remove_unused_columns": False
    }),
}  # fmt: skip

# The configs that do not load, and what the message says.
REFUSED = {"llama-3 relora": "relora is not supported: ReLoRA merges the adapter",
           "llama-3 loftq": "peft is not supported: LoftQ replaces",
           "llama-3 context parallel": "context_parallel_size: 4 is not supported: sequences are not split",
           "llama-3 vision": "processor_type is not supported: models are trained on text only"}  # fmt: skip


def values_of(name):
    """The keys of a config; those of a later part, and at last its own, replace earlier ones."""
    base_model, parts, own = CONFIGS[name]
    values = {"base_model": base_model}
    for keys in (COMMON, *parts, own):
        plugins = [*values.get("plugins", []), *keys.get("plugins", [])]
        values |= {**keys, **({"plugins": plugins} if plugins else {})}
    return values


def load(name, tmp_path):
    from ruamel.yaml import YAML

    with open(tmp_path / "config.yaml", "w", encoding="utf-8") as file:
        YAML().dump(values_of(name), file)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return load_config(tmp_path / "config.yaml"), [str(warning.message) for warning in caught]


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in REFUSED])
def test_it_loads_and_every_warning_names_a_key(name, tmp_path):
    config, messages = load(name, tmp_path)
    assert config.method.name.startswith("SFT") and config.base_model == CONFIGS[name][0]
    for message in messages:
        assert message.partition(":")[0].split(",")[0] in values_of(name)


@pytest.mark.parametrize(("name", "message"), REFUSED.items())
def test_it_is_refused_with_the_reason(name, message, tmp_path):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load(name, tmp_path)
