"""The quickstart without a download: a small model of Python code, made here, then fine-tuned on docstrings.

Plain pretraining on source files of the standard library makes the base model; energy-based fine-tuning continues on
the docstrings of files that the base model never saw, and is measured on the docstrings of yet other files.
"""

import ast
import hashlib
import json
import sys
import sysconfig
from bisect import bisect
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ebft.config.section import changed_keys
from ebft.run.config.schema import load_config
from ebft.run.training import train
from ebft.tools.quickstart.run import CONFIGS, Phases, Run, console, make_once, moved, own_copy, show_command

OUTPUT = Path("outputs/quickstart-tiny")  # what the two configs name


@dataclass(frozen=True)
class Scale:
    """Sizes that are not in tiny_base.yaml and tiny.yaml, and the overrides that change sizes there."""

    max_files: int | None
    vocab_size: int
    shape: dict[str, int]
    groups: int  # of held-out windows
    base_overrides: list[str] = field(default_factory=list)
    ebft_overrides: list[str] = field(default_factory=list)


def _shape(width: int, layers: int) -> dict[str, int]:
    """Sizes of a Llama with heads of 32 numbers."""
    sizes = {"hidden_size": width, "intermediate_size": width * 8 // 3, "num_hidden_layers": layers}
    return sizes | dict.fromkeys(("num_attention_heads", "num_key_value_heads"), width // 32)


_SHORT = ["sequence_len=64", "micro_batch_size=2", "warmup_steps=1", "logging_steps=1"]
SCALES = {
    "full": Scale(max_files=None, vocab_size=4096, shape=_shape(128, 4), groups=24),
    "test": Scale(
        max_files=60,
        vocab_size=512,
        shape=_shape(32, 4),
        groups=2,
        base_overrides=["max_steps=3", *_SHORT],
        ebft_overrides=["max_steps=2", *_SHORT],
    ),
}


def prepare_tiny(phases: Phases, output: Path, seed: int, scale_name: str) -> Run:
    """Write the text, pretrain the base model, and return the run that fine-tunes it."""
    scale = SCALES[scale_name]
    data, init, base = output / "data", output / "init", output / "base"
    base_file, paths = CONFIGS / "tiny_base.yaml", {"base_model": "init", "datasets.0.path": "data/base.jsonl"}
    overrides = [*moved(output, OUTPUT, {**paths, "output_dir": "base"}), *scale.base_overrides]
    config = load_config(base_file, overrides)

    with phases.phase("data", "Text: the source of this machine's Python standard library"):
        made_from = [sys.version, scale.max_files, PARTS]
        make_once(data, made_from, lambda: write_corpus(data, scale.max_files))

    with phases.phase("init", "A tokenizer, and a small Llama with random weights"):
        made_from += [scale.vocab_size, scale.shape, config.sequence_len]
        make_once(init, made_from, lambda: save_random_model(init, data / "base.jsonl", scale, config.sequence_len))

    with phases.phase("base", "Base model: plain pretraining on source code"):
        made_from += [dict(changed_keys(config))]
        show_command(own_copy(base_file, output), overrides)
        make_once(base, made_from, lambda: train(config))

    paths = {"datasets.0.path": "data/ebft.jsonl", "test_datasets.0.path": "data/held_out.jsonl"}
    changed = moved(output, OUTPUT, {"base_model": "base", **paths, "output_dir": "ebft"})
    overrides = [*changed, *([f"seed={seed}"] if seed else []), *scale.ebft_overrides]
    return Run(own_copy(CONFIGS / "tiny.yaml", output), overrides, scale.groups, earlier={"base": config})


# Tests and tables of characters are left out: they are not on every machine, and hardly anyone writes such code.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
PARTS = {"base": 60, "ebft": 25, "held_out": 15}  # in percent of the files
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def write_corpus(folder: Path, max_files: int | None = None) -> None:
    """Write base.jsonl (source), ebft.jsonl and held_out.jsonl (docstrings), by a hash of each path."""
    parts: dict[str, list[dict[str, str]]] = {part: [] for part in PARTS}
    for file, text in standard_library(max_files).items():
        part = list(PARTS)[bisect(list(accumulate(PARTS.values())), number_of(file) % 100)]
        text = text if part == "base" else docstrings(text)
        if text:
            parts[part].append({"text": text, "file": file})
    folder.mkdir(parents=True, exist_ok=True)
    for part, rows in parts.items():
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        console.print(f"{part}.jsonl: {len(rows)} files, {sum(len(row['text']) for row in rows) / 1e6:.1f} MB")


def standard_library(max_files: int | None = None) -> dict[str, str]:
    """Path below the library's folder -> text, for every distinct UTF-8 source file that is not a test."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: dict[str, str] = {}
    seen: set[str] = set()
    for path in track(library_files(root)[:max_files], description="reading source files"):
        try:
            text = path.read_text(encoding="utf-8")
            ast.parse(text)
        except (UnicodeDecodeError, SyntaxError, OSError):
            continue  # data of some test or template, or a file that this user may not read
        if text.strip() and text not in seen:
            seen.add(text)
            texts[path.relative_to(root).as_posix()] = text
    return texts


def docstrings(source: str) -> str:
    """All docstrings of a source file, with a blank line between them; empty where there is none."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED)]
    return "\n\n".join(text for node in nodes if (text := ast.get_docstring(node)))


def library_files(root: Path) -> list[Path]:
    """The library's own source files in an order that does not follow their names, the same on every machine."""
    files = [path for path in root.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(root).parts)]
    return sorted(files, key=lambda path: number_of(path.relative_to(root).as_posix()))


def number_of(file: str) -> int:
    return int.from_bytes(hashlib.blake2b(file.encode(), digest_size=8).digest(), "big")


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
    with texts.open(encoding="utf-8") as lines:
        tokenizer.train_from_iterator((json.loads(line)["text"] for line in lines), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
