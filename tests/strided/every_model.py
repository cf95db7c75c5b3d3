"""A tiny random model of every causal language model of transformers, by the names of the sizes in its config."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.strided.families import COUNTS_PADDING, FAMILIES, RUNNING_STATE, VOCAB, tiny_model, with_large_weights

NAMES = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
WINDOW = 9  # tokens of windows and chunks, and constants at which something changes: the documents are longer

_BY_SIZE = {VOCAB: "vocab_size", 32: "hidden_size d_model n_embd dim embed_dim embedding_size word_embed_proj_dim",
            4: "num_hidden_layers n_layer num_layers n_layers decoder_layers encoder_layers num_decoder_layers "
               "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
               "num_local_experts num_experts n_routed_experts moe_num_experts qk_rope_head_dim",
            2: "num_key_value_heads num_kv_heads swa_num_key_value_heads first_k_dense_replace "
               "num_experts_per_tok num_experts_per_token moe_top_k moe_topk moe_k", 1: "n_group topk_group",
            48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dim_feedforward ffn_hidden_size "
                "intermediate_size_mlp", 8: "head_dim qk_nope_head_dim v_head_dim",
            16: "q_lora_rank kv_lora_rank moe_intermediate_size shared_expert_intermediate_size "
                "moe_shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size",
            512: "max_position_embeddings n_positions max_seq_len seq_length n_ctx",
            WINDOW: "sliding_window attention_chunk_size floor_scale window_size local_attention"}  # fmt: skip
_SIZES = {name: size for size, names in _BY_SIZE.items() for name in names.split()}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": WINDOW}
SPECIAL = {
    "bailing_hybrid": {"n_group": 1, "topk_group": 1, "num_expert_group": 1},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _MROPE)},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
             "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 32, "moe_jitter_eps": 0.1, "moe_top_k": 2}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "gemma3n_text": {"intermediate_size": [48] * 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
                     "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
                     "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8},
    "gemma4_text": {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8,
                    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4},
    "longcat_flash": {"head_dim": 4, "num_layers": 2, "num_hidden_layers": 2, "zero_expert_num": 2},
    "ministral": {"head_dim": 8},
    "ministral3": {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.5}},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "lsh"] * 2},
    "roc_bert": {"pronunciation_vocab_size": 20, "shape_vocab_size": 20},
    "xlm": {"emb_dim": 32},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip

# Without a tiny model: multimodal around a text model with its own name, or without one; drafts; music; bytes; sizes
# that a tiny model lacks; an indexer without default sizes.
_NOT_BUILT = """
blt emu3 git mllama phi4_multimodal moss_transcribe_diarize dots3_note dots3_note_text fuyu got_ocr2 gemma3 gemma3n
gemma4 gemma4_unified llama4 qwen3_5 qwen3_5_moe qwen4_exp gemma4_assistant gemma4_unified_assistant musicgen
musicgen_melody qwen4_exp_text zamba
"""
NOT_BUILT = _NOT_BUILT.split()


def build(name):
    """The model of a `model_type`, in float32, with eager attention."""
    if name in (*FAMILIES, *RUNNING_STATE, *COUNTS_PADDING):
        return tiny_model(name)
    defaults = AutoConfig.for_model(name)
    known = defaults.to_dict()
    sizes = {key: size for key, size in _SIZES.items() if known.get(key) is not None}
    if "qk_rope_head_dim" in known:  # attention through a latent space
        sizes = {**sizes, "num_key_value_heads": 4}
        sizes.pop("head_dim", None)
    config = type(defaults)(**{**sizes, **_IDS, **SPECIAL.get(name, {})})
    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if parameters > 2e7:
        raise ValueError(f"{parameters / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    return with_large_weights(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
