"""Tiny random models of every family the trainer promises, with the features that make each one special."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 97

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILIES = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 11, "head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 10, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"head_dim": 8, "sliding_window": 7, "sliding_window_pattern": 2},
    "phi3": {"sliding_window": 12},
    "gpt_neox": {"rotary_pct": 0.5, "num_key_value_heads": 4},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128},
    "olmo2": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.7},
    "cohere2": {"sliding_window": 6, "sliding_window_pattern": 2, "logit_scale": 0.3, "head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "olmo3": {"sliding_window": 6},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": True},
    "seed_oss": {"head_dim": 8},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "llama4_text": {
        "head_dim": 8,
        "attention_chunk_size": 16,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48,
        "no_rope_layers": [1, 1, 1, 0],
    },
}


_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
# Models whose layers keep a running state, which several rollouts cannot share: for structured mode only.
RUNNING_STATE = {
    "qwen3_5_text": {"head_dim": 16, **_LINEAR},
    "lfm2": {"full_attn_idxs": [1, 3]},
    "falcon_h1": {"head_dim": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 16},
}


def tiny_model(family, seed=0, **changes):
    """A random float32 model with weights large enough that attention and logits are far from uniform."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**_COMMON, **{**FAMILIES, **RUNNING_STATE}[family], **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.25)
            elif "sinks" in name:
                parameter.normal_(0, 1.0)
    return model.float()
