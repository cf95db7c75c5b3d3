"""Tiny multimodal models, whose text models are trained alone."""

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

_TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
         "num_key_value_heads": 2, "vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 1}  # fmt: skip
_MOE = {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 8, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 512, "num_kv_shared_layers": 0, "enable_moe_block": True, "num_experts": 4,
        "top_k_experts": 2, "moe_intermediate_size": 16, "num_global_key_value_heads": 2,
        "sliding_window": 8}  # fmt: skip
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "head_dim": 16, "num_key_value_heads": 4}  # fmt: skip
_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16,
           "num_key_value_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
_MIXED = ["conv", "full_attention"]
# The classes of the text and of the vision model, and what the text model has besides. Each kind of multimodal model
# stores its weights under other names.
MULTIMODAL = {
    "gemma3": ("Gemma3ForCausalLM", "siglip_vision_model", {"model_type": "gemma3_text", "sliding_window": 8}),
    "gemma4": ("Gemma4ForCausalLM", "gemma4_vision", {"model_type": "gemma4_text", **_MOE}),
    "lfm2_vl": ("Lfm2ForCausalLM", "siglip2_vision_model", {"model_type": "lfm2", "layer_types": _MIXED}),
    "llava": ("LlamaForCausalLM", "clip_vision_model", {"model_type": "llama"}),
    "mistral3": ("Mistral4ForCausalLM", "pixtral", {"model_type": "mistral4", **_MLA}),
    "smolvlm": ("LlamaForCausalLM", "smolvlm_vision", {"model_type": "llama"}),
}


def save_multimodal(kind, folder, **changes):
    """The whole model, saved in a folder, with weights that are large enough for tests."""
    _, vision, text = MULTIMODAL[kind]
    text = {**_TEXT, **text, **changes}
    config = CONFIG_MAPPING[kind](text_config=text, vision_config={**_VISION, "model_type": vision})
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.05)
    model.save_pretrained(folder)
    return model


def text_logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(5, 21)[None], use_cache=False).logits
