"""A GGUF file as llama.cpp's converter writes it, from a Llama and a byte-level BPE tokenizer, in Q8_0."""

import json

import gguf
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

CONTROL, NORMAL = 3, 1  # token types


def write_gguf(path, model, tokenizer, pre="gpt-2", add_bos=True, chat_template=None):
    """Write the file; the weights that it holds, by the names of transformers."""
    writer = gguf.GGUFWriter(path, "llama")
    _write_shape(writer, model.config)
    _write_tokenizer(writer, tokenizer, pre, add_bos, chat_template)
    held, kind = {}, GGMLQuantizationType.Q8_0
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        short, array, heads = names.get_name(name, (".weight",)), weight.numpy(), _heads(name, model.config)
        if weight.dim() == 1:
            writer.add_tensor(short, array)
            held[name] = weight
            continue
        packed = quantize(_exchanged(array, heads, 2, -1), kind)
        writer.add_tensor(short, packed, raw_dtype=kind)
        held[name] = torch.tensor(_exchanged(dequantize(packed, kind), heads, -1, 2))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _heads(name, config):
    """How many heads have their rows in llama.cpp's order, 0 where rows keep theirs."""
    counts = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return next((count for part, count in counts.items() if part in name), 0)


def _exchanged(array, heads, *sizes):
    """Rows of each head, as two halves or as pairs (`sizes`), in the other order, as llama.cpp has rotary pairs."""
    return array.reshape(heads, *sizes, array.shape[1]).swapaxes(1, 2).reshape(array.shape) if heads else array


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
