"""A tokenizer trained on the corpus, and a small Llama with random weights: what `base_model` of base.yaml names."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ebft.quickstart.phases import console
from ebft.quickstart.scale import Scale

END, PAD = "<|end|>", "<|pad|>"


def save_random_model(folder: Path, texts: Path, scale: Scale, positions: int) -> None:
    """Train a tokenizer on the rows of `texts`, and save it in `folder` with a random model for `positions` tokens."""
    tokenizer = train_tokenizer(texts, scale.vocab_size)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            max_position_embeddings=positions,
            tie_word_embeddings=True,
            **{"initializer_range": 0.05, **scale.shape},  # narrow layers learn slowly from the usual 0.02
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    console.print(f"{len(tokenizer):,} tokens, {model.num_parameters() / 1e6:.1f} million parameters")


def train_tokenizer(texts: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `vocab_size` tokens, trained on the `text` of a JSONL file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(read_texts(texts), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)


def read_texts(path: Path) -> Iterator[str]:
    """The `text` of each row of a JSONL file."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]
