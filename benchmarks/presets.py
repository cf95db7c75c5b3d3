"""The models that are measured, the options of the step, and the document it runs on."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ebft.models.pretrained import pretrained_model, pretrained_tokenizer

# The options of both trainers, by our names; theirs are the same with `ebft_` before them. What is not here is the
# default of both: coefficients 1, RLOO, no cross-entropy term.
OPTIONS = {
    "stride": 8,
    "context_length": 8,
    "generate_max_len": 8,
    "n_samples_per_prompt": 4,
    "temperature": 0.6,
    "feature_layers": [0.25, 0.5, 0.75],
    "use_whitening": False,
}


def llama(hidden: int, intermediate: int, layers: int, heads: int, key_value_heads: int, words: int) -> dict[str, int]:
    """The shape of a Llama, as LlamaConfig names it."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return dict(zip((*names, "vocab_size"), (hidden, intermediate, layers, heads, key_value_heads, words)))


@dataclass(frozen=True)
class Preset:
    """A Llama, how it is fine-tuned, and which lengths are measured unless the command line says otherwise."""

    name: str
    shape: dict[str, int]  # of LlamaConfig
    lora_rank: int | None  # None or 0: full fine-tuning
    dtypes: tuple[str, ...]  # the first for both trainers, the others for ours alone
    lengths: tuple[int, ...]  # for both trainers
    alone: tuple[int, ...]  # for ours only
    variants: dict[str, dict[str, Any]]  # ours with other settings, see `sides.ours`, beside the others at some lengths
    overhead_steps: int = 0  # of a whole `ebft train` run; 0 for models too large to save and load on the way
    weights: str | None = None  # the name of a model of this shape to load

    @property
    def description(self) -> str:
        """The model in words."""
        shape = self.shape
        tuning = f"LoRA of rank {self.lora_rank}" if self.lora_rank else "full fine-tuning"
        return (
            f"{self.weights or 'random Llama'}, hidden {shape['hidden_size']}, intermediate "
            f"{shape['intermediate_size']}, {shape['num_hidden_layers']} layers, {shape['num_attention_heads']}/"
            f"{shape['num_key_value_heads']} heads, vocabulary {shape['vocab_size']}, {tuning}"
        )

    def shrunken(self) -> Preset:
        """The same code at a size that takes seconds on any machine."""
        return replace(self, name=f"{self.name}-tiny", shape=llama(64, 96, 4, 4, 2, 512), weights=None)


def find_preset(name: str, on_cuda: bool) -> Preset:
    """A preset by name. On CUDA the small model runs in bfloat16 too, which is what the published trainer casts to."""
    if name == "1b":
        # The published trainer fails with an adapter in float32.
        ways = {"ours flex": {"attention": "flex_attention"}, "ours single pass": {"single_pass": True}}
        ways["ours recorded"] = {"cuda_graphs": True}
        ways["ours full"] = {"lora_rank": 0}
        return Preset("1b", llama(2048, 8192, 16, 32, 8, 128256), 16, ("bfloat16",), (1024, 2048), (), ways)
    if name == "smollm2":
        ways = {"ours bfloat16": {"dtype": "bfloat16"}, "ours LoRA": {"lora_rank": 16}}
        ways |= {"ours LoRA bf16": {"lora_rank": 16, "dtype": "bfloat16"}, "ours unmerged": {"merge_rollouts": False}}
        shape = llama(576, 1536, 30, 9, 3, 49152)
        return Preset("smollm2", shape, None, ("float32",), (256, 512), (), ways, weights="smollm2-135m")
    dtypes = ("bfloat16",) if on_cuda else ("float32", "bfloat16")
    ways, lengths = {"ours second forward": {"single_pass": False}}, (256, 512, 1024, 2048)
    return Preset("7m", llama(256, 704, 8, 4, 2, 4096), None, dtypes, lengths, (4096, 8192), ways, overhead_steps=12)


def train_tokenizer(texts: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE, trained on a file."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train(str(texts), vocab_size, special_tokens=["<|end|>", "<|pad|>"], show_progress=False)
    trained = Tokenizer.from_str(tokenizer.to_str())
    return PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|end|>", pad_token="<|pad|>")


def build_model(preset: Preset, dtype: torch.dtype, positions: int, attention: str | None = None) -> nn.Module:
    """The preset's model: the same weights in every call. An adapter's own are float32, as `ebft train` has them."""
    torch.manual_seed(0)
    model = _random_model(preset, positions) if preset.weights is None else pretrained_model(preset.weights)
    model = model.to(dtype)
    if attention is not None:
        model.set_attn_implementation(attention)
    if not preset.lora_rank:
        return model
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapter = LoraConfig(
        task_type="CAUSAL_LM", r=preset.lora_rank, lora_alpha=2 * preset.lora_rank, target_modules=targets
    )
    return get_peft_model(model, adapter)


def _random_model(preset: Preset, positions: int) -> nn.Module:
    special = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # a GPU draws 1B weights in no time
        return LlamaForCausalLM(LlamaConfig(max_position_embeddings=positions, **special, **preset.shape))


def document(preset: Preset, length: int, device: torch.device) -> dict[str, Tensor]:
    """The same document for the same length: source code for a model with weights, else random tokens."""
    if preset.weights is not None:
        tokens = pretrained_tokenizer(preset.weights)(inspect.getsource(argparse), return_tensors="pt").input_ids
        tokens = tokens[:, :length]
    else:
        generator = torch.Generator().manual_seed(length)
        tokens = torch.randint(3, preset.shape["vocab_size"], (1, length), generator=generator)
    return {"input_ids": tokens.to(device)}


def num_blocks(length: int) -> int:
    """Blocks of a document without a prompt."""
    return (length - OPTIONS["generate_max_len"] - OPTIONS["context_length"]) // OPTIONS["stride"] + 1


def num_generated(length: int) -> int:
    """Tokens that a step samples for a document."""
    return num_blocks(length) * OPTIONS["n_samples_per_prompt"] * OPTIONS["generate_max_len"]
