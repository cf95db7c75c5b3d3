"""Tokens per second of SFT on short documents: padded batches, packed rows, and batches without padding.

    python -m benchmarks.sft_packing [--preset 7m] [--length 512] [--rows 8] [--cpu-time]

Random tokens. Lengths of documents are log-normal, with a median of a sixth of the longest. Every way trains on the
same documents with the trainer of `ebft train`; they take turns, and each has its fastest round, to which other work on
the machine adds least. Tokens are those of documents, without padding.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainingArguments

from benchmarks.measuring import RESULTS, Clock, in_turn, machine, parser_of, quiet_folder, rounded, store
from benchmarks.presets import Preset, build_model, find_preset
from ebft.data.documents import JoiningCollator, pack_rows
from ebft.sft.trainer import SFTTrainer

MEDIAN, SPREAD = 1 / 6, 0.7  # of the lengths: relative to the longest, and the deviation of their logarithm


def short_documents(count: int, longest: int, vocabulary: int) -> list[dict[str, list[int]]]:
    """The same documents in every call."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(count, generator=generator) * SPREAD + math.log(MEDIAN * longest)).exp()
    return [
        {"input_ids": torch.randint(3, vocabulary, (length,), generator=generator).tolist()}
        for length in lengths.long().clamp(2, longest).tolist()
    ]


class Way:
    """A trainer with its batches over all documents."""

    def __init__(self, model: Any, rows: Any, per_batch: int, folder: Path, batch_flattening: bool) -> None:
        args = TrainingArguments(str(folder), report_to=[], disable_tqdm=True, use_cpu=not torch.cuda.is_available())
        collator = JoiningCollator(0)
        self.trainer = SFTTrainer(model, args, collator, train_dataset=rows, batch_flattening=batch_flattening)
        self.trainer.current_gradient_accumulation_steps = 1
        starts = range(0, len(rows), per_batch)
        self.batches: list[dict[str, Tensor]] = [
            collator([rows[i] for i in range(at, min(at + per_batch, len(rows)))]) for at in starts
        ]

    def run(self) -> None:
        """One pass over all documents: losses and gradients, without updates."""
        for batch in self.batches:
            count = batch["labels"].ne(-100).sum()
            self.trainer.training_step(self.trainer.model, batch, count)
            self.trainer.model.zero_grad()

    @property
    def padding(self) -> float:
        """The share of padding in the tokens that the model computes."""
        if self.trainer.is_padding_free(self.batches[0]):
            return 0.0
        masks = [batch["attention_mask"] for batch in self.batches]
        return 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)


def make_ways(preset: Preset, rows: list[Any], plan: argparse.Namespace, folder: Path) -> dict[str, Way]:
    """Batches of as many documents, or of as many packed rows as have about the tokens of such a batch."""
    model = build_model(preset, getattr(torch, plan.dtype), plan.length, plan.attention)
    tokens = sum(len(row["input_ids"]) for row in rows)
    packed = pack_rows(rows, plan.length)
    per_batch = max(1, round(plan.rows * tokens / len(rows) / plan.length))
    return {
        "padded": Way(model, rows, plan.rows, folder, False),
        "sample_packing": Way(model, packed, per_batch, folder, False),
        "batch_flattening": Way(model, rows, plan.rows, folder, True),
    }


def measure(ways: dict[str, Way], tokens: int, repeats: int) -> list[dict[str, Any]]:
    """The fastest round of every way, after one that is not counted."""
    seconds = in_turn({name: way.run for name, way in ways.items()}, repeats + 1, ways["padded"].trainer.args.device)
    rates = {name: tokens / min(found[1:]) for name, found in seconds.items()}
    return [
        {"way": name, "tokens_per_s": rates[name], "ratio": rates[name] / rates["padded"]}
        | {"padding": way.padding, "batches": len(way.batches)}
        for name, way in ways.items()
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, repeats=3, cpu_time=True)
    add = parser.add_argument
    add("--preset", choices=("7m", "smollm2", "1b"), default="7m")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--attention", help="the implementation of attention (default: the model's own)")
    add("--length", type=int, default=512, help="tokens of the longest document and of a packed row")
    add("--documents", type=int, default=64)
    add("--rows", type=int, default=8, help="documents of a padded batch")
    plan = parser.parse_args(arguments)
    if plan.cpu_time:
        Clock.count_cpu_seconds()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    preset = find_preset(plan.preset, on_cuda=device.type == "cuda")
    preset = preset.shrunken() if plan.tiny else preset
    rows = short_documents(plan.documents, plan.length, preset.shape["vocab_size"])
    lengths = sorted(len(row["input_ids"]) for row in rows)
    with quiet_folder() as folder:
        found = measure(make_ways(preset, rows, plan, folder), sum(lengths), plan.repeats)
    card = {
        "model": f"{preset.description}, {plan.dtype}",
        "attention": plan.attention,
        "documents": f"{len(rows)} of {lengths[0]} to {lengths[-1]} tokens, median {lengths[len(rows) // 2]}",
        "rows": f"{plan.rows} documents in a padded batch, packed rows of {plan.length} tokens",
        "rounds": plan.repeats,
        **machine(device),
    }
    for name, value in card.items():
        print(f"{name:<14}{value}")
    for row in found:
        print(
            f"{row['way']:<20}{row['tokens_per_s']:8.0f} tokens/s   {row['ratio']:5.2f} x   "
            f"padding {row['padding']:4.0%}   {row['batches']} batches"
        )
    results = rounded({"card": card, "ways": found})
    print(json.dumps(results))
    store(plan.output or RESULTS / f"sft-packing-{preset.name}-{device.type}.json", results)


if __name__ == "__main__":
    main()
