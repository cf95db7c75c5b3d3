"""Tiny random models of every family the trainer promises, with the features that make each one special."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 97

_COMMON = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
           "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
           "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip

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
    "bloom": {"n_layer": 4, "n_head": 4},
    "bloom/6 heads": {"hidden_size": 48, "n_layer": 4, "n_head": 6},
    "mpt": {"d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 128, "expansion_ratio": 2},
    "mpt/6 heads": {"d_model": 48, "n_layers": 4, "n_heads": 6, "max_seq_len": 128, "expansion_ratio": 2},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "falcon/multi-query": {"multi_query": True, "new_decoder_architecture": False},
    "gptj": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128, "rotary_dim": 4},
    "codegen": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128, "rotary_dim": 4},
    "gpt_neo": {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 9},
    "stablelm": {"qk_layernorm": True},
    "nemotron": {"head_dim": 8},
    "diffllama": {"num_key_value_heads": 2},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.3},
    "deepseek_v3": {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
                    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 2,
                    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
                    "v_head_dim": 8},
    "llama4_text": {"head_dim": 8, "attention_chunk_size": 16, "floor_scale": 9, "attn_scale": 0.5,
                    "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 48,
                    "no_rope_layers": [1, 1, 1, 0]},
}  # fmt: skip


def lora_targets(family):
    """All linear layers, except for families whose routers return a tuple, which PEFT cannot wrap."""
    if family in ("nemotron_h", "falcon_h1", "mamba2", "falcon_mamba"):  # whose out_proj PEFT refuses
        return ["in_proj", "q_proj", "o_proj"]
    return ["q_proj", "v_proj", "o_proj"] if family in ("llama4_text", "phimoe") else "all-linear"


_LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
           "linear_value_head_dim": 16}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
# Models whose layers keep a running state. Prompts are not shared in structured mode.
RUNNING_STATE = {
    "qwen3_5_text": {"head_dim": 16, **_LINEAR},
    "qwen3_5_moe_text": {"head_dim": 16, **_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_next": {"head_dim": 16, **_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "nemotron_h": {"head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
                   "layers_block_type": ["mamba", "attention", "moe", "mamba"], "n_routed_experts": 4, "n_group": 1,
                   "topk_group": 1, "moe_shared_expert_intermediate_size": 16, "num_experts_per_tok": 2,
                   "moe_intermediate_size": 16},
    "lfm2": {"full_attn_idxs": [1, 3]},
    "lfm2_moe": {**_EXPERTS, "layer_types": ["conv", "full_attention"] * 2},
    "falcon_h1": {"head_dim": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8,
              "use_mamba_kernels": False},
    "zamba2": {"num_key_value_heads": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1,
               "use_mem_rope": True, "mamba_ngroups": 1, "n_mamba_heads": 4, "mamba_headdim": 16, "mamba_d_state": 8},
    "bamba": {"attn_layer_indices": [1], **_MAMBA},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 32,
                         "num_local_experts": 2, "num_experts_per_tok": 1, **_MAMBA},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, **_LINEAR},
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "expand": 2},
    "falcon_mamba": {"state_size": 8},
}  # fmt: skip
# In strided mode a row for each rollout: layers that do not continue from a state with several tokens.
AS_ROWS = {"jamba", "falcon_mamba", "mamba2"}
WITH_STATES = [name for name in RUNNING_STATE if name not in AS_ROWS]
# Those whose state passes over padding on the left: structured mode does not sample from them.
COUNTS_PADDING = {
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 64, "head_dim": 8},
    "rwkv": {"attention_hidden_size": 32},
    "minimax": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 2,
                "num_experts_per_tok": 1, "head_dim": 8, "block_size": 16},
}  # fmt: skip


def tiny_model(family, seed=0, **changes):
    """A random model of a family, see `with_large_weights`."""
    torch.manual_seed(seed)
    special = {**FAMILIES, **RUNNING_STATE, **COUNTS_PADDING}[family]
    config = AutoConfig.for_model(family.partition("/")[0], **{**_COMMON, **special, **changes})
    return with_large_weights(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


def with_large_weights(model):
    """The model in float32, with random weights large enough that attention and logits are far from uniform."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and not name.endswith("A_log"):  # which must be small
                parameter.normal_(0, 0.25)
            elif "sinks" in name:
                parameter.normal_(0, 1.0)
    return model.float()


class WithEmbedding:
    """A Mamba whose `hidden_states` start with the embedding, and have the last layer's output only after the norm."""

    def __init__(self, model):
        self.model = model

    def __call__(self, input_ids, output_hidden_states):
        output = self.model(input_ids=input_ids, output_hidden_states=output_hidden_states)
        *layers, _, last = output.hidden_states
        output.hidden_states = (self.model.get_input_embeddings()(input_ids), *layers, last)
        return output


def for_oracle(model):
    """The model with the hidden states that oracles index by depth."""
    return WithEmbedding(model) if model.config.model_type in ("mamba2", "falcon_mamba") else model
