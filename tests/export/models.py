"""Tiny random models of several architectures, and adapters on them whose weights are not zero."""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, GptOssConfig, LlamaConfig, MixtralConfig, Qwen2Config

SIZES = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def llama(**changes):
    return LlamaConfig(**SIZES, **changes)


def qwen2():
    return Qwen2Config(**SIZES)  # its projections have biases


def mixtral():
    return MixtralConfig(**SIZES, num_local_experts=4)  # the checkpoint has one weight per expert, the model fused ones


def gpt_oss():
    return GptOssConfig(**SIZES | {"intermediate_size": 32}, num_local_experts=2, num_experts_per_tok=1, head_dim=16)


def gpt2():
    return GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=64)  # Conv1D: fan_in_fan_out


def save_base(folder: Path, config, dtype=torch.float32, max_shard_size="40KB") -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def save_adapter(folder: Path, base: Path, **settings) -> Path:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, **settings))
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)  # in place: tied adapters share their memory
    model.save_pretrained(folder)
    return folder


def with_adapter(base: Path, adapter: Path) -> PeftModel:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(12)[None]).logits
