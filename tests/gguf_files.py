"""A GGUF file as llama.cpp's converter writes it, from a Llama and a byte-level BPE tokenizer.

Matrices are in blocks of 32 values (Q8_0); what they stand for is computed by the gguf package itself.
"""

import json

import gguf
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

CONTROL, NORMAL = 3, 1  # token types
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
NAMES |= {f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"} | {"self_attn.o_proj": "attn_output"}
NAMES |= {f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}
NAMES |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def write_gguf(path, model, tokenizer, pre="gpt-2", add_bos=True, chat_template=None):
    """Write the file; the weights that it holds, by the names of transformers."""
    writer = gguf.GGUFWriter(path, "llama")
    _write_shape(writer, model.config)
    _write_tokenizer(writer, tokenizer, pre, add_bos, chat_template)
    held = {}
    for name, weight in model.state_dict().items():
        array = weight.numpy()
        if weight.dim() == 1:
            writer.add_tensor(_gguf_name(name), array)
            held[name] = weight
            continue
        heads = _heads(name, model.config)
        packed = quantize(_interleaved(array, heads), GGMLQuantizationType.Q8_0)
        writer.add_tensor(_gguf_name(name), packed, raw_dtype=GGMLQuantizationType.Q8_0)
        held[name] = torch.tensor(_separated(dequantize(packed, GGMLQuantizationType.Q8_0), heads))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _gguf_name(name):
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"


def _heads(name, config):
    """How many heads have their rows in llama.cpp's order, 0 where rows keep theirs."""
    counts = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return next((count for part, count in counts.items() if part in name), 0)


def _interleaved(array, heads):
    """Rows of each head with the two halves of its rotary pairs next to each other."""
    if not heads:
        return array
    rows, columns = array.shape
    return array.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _separated(array, heads):
    if not heads:
        return array
    rows, columns = array.shape
    return array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_shape(writer, config):
    writer.add_name("A Title That Is No Folder")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _write_tokenizer(writer, tokenizer, pre, add_bos, chat_template):
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    special = set(tokenizer.all_special_tokens)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([CONTROL if token in special else NORMAL for token in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(add_bos)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
