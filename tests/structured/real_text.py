"""A small model trained on the standard library's source, and prompts with references from files it never saw."""

import json
import sysconfig
from pathlib import Path

import torch

CONTEXT, REFERENCE = 24, 16  # tokens of a prompt and of its reference
HELD_OUT_EVERY = 6  # file


def make_base_model(folder: Path, steps: int = 500) -> Path:
    """Train a tokenizer and a Llama of 0.9 million parameters by SFT; rows go beside it."""
    from ebft import train
    from ebft.run.config.schema import RunConfig

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:120]
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in files]
    unseen = texts[::HELD_OUT_EVERY]
    seen = [text for number, text in enumerate(texts) if number % HELD_OUT_EVERY]
    tokenizer = _save_random_model(folder / "init", seen)
    (folder / "base.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in seen))
    _write_rows(folder / "rows.jsonl", tokenizer, unseen)
    config = {"base_model": folder / "init", "datasets": [{"path": folder / "base.jsonl", "type": "completion"}]}
    config |= {"sequence_len": 96, "micro_batch_size": 8, "max_steps": steps, "learning_rate": 4e-3, "warmup_steps": 20}
    train(RunConfig.from_dict({**config, "save_strategy": "no", "output_dir": folder / "base"}))
    return folder / "base"


def _save_random_model(folder: Path, texts: list[str]):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|pad|>"]
    sizes = {"vocab_size": 1024, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(special_tokens=special, **sizes)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[1])
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    ids = {"eos_token_id": fast.eos_token_id, "pad_token_id": fast.pad_token_id, "bos_token_id": None}
    LlamaForCausalLM(
        LlamaConfig(vocab_size=len(fast), initializer_range=0.05, tie_word_embeddings=True, **shape, **heads, **ids)
    ).save_pretrained(folder)
    fast.save_pretrained(folder)
    return fast


def _write_rows(path: Path, tokenizer, texts: list[str]) -> None:
    """Consecutive pieces of each text, in an order that mixes the files."""
    rows = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        for start in range(0, len(ids) - CONTEXT - REFERENCE, 400):
            middle = start + CONTEXT
            pieces = {"input": ids[start:middle], "output": ids[middle : middle + REFERENCE]}
            rows.append({name: tokenizer.decode(piece) for name, piece in pieces.items()})
    rows = [row for row in rows if row["input"].strip() and row["output"].strip()]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    path.write_text("\n".join(json.dumps(rows[index]) for index in order))
