"""A step on a batch of short documents at the size of a real model: LoRA and full, two types, the share of sampling.

    ebft fetch smollm2-135m
    python -m benchmarks.short_documents [--documents 8] [--length 66] [--cpu-time]

SmolLM2-135M with its own weights, random tokens, the options of strided_step.py and a cross-entropy term. Ways of
stepping take turns, and each has the seconds of its fastest round, to which other work on the machine adds least.
Sampling is everything between logits and sampled tokens: softmax, sampling, log-probability and its slope, entropy.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ebft.prefix.logps
from benchmarks.flops import counted_flops
from benchmarks.measuring import Clock, GemmRate, machine, stopwatch, with_peak_memory
from benchmarks.presets import OPTIONS, find_preset
from benchmarks.sides import Side, ours
from benchmarks.strided_step import RESULTS, rounded

LORA_RANK = 16
CE_COEF = 0.03
WAYS: dict[str, dict[str, Any]] = {
    "LoRA bfloat16": {"lora_rank": LORA_RANK, "dtype": "bfloat16"},
    "LoRA bfloat16, second forward": {"lora_rank": LORA_RANK, "dtype": "bfloat16", "single_pass": False},
    "full bfloat16": {"dtype": "bfloat16"},
    "LoRA float32": {"lora_rank": LORA_RANK, "dtype": "float32"},
    "full float32": {"dtype": "float32"},
}


def timed_step(side: Side, inputs: dict[str, Tensor]) -> dict[str, float]:
    """Seconds of a step by phase, and those of sampling, which are part of its phases."""
    sampling: dict[str, float] = {}
    with ExitStack() as watching:
        watching.enter_context(stopwatch(ebft.prefix.logps, "_choose", "sampling", sampling, side.device))
        return {**side.timed_step(inputs), **sampling}


def measure(sides: dict[str, Side], inputs: dict[str, Tensor], repeats: int) -> list[dict[str, Any]]:
    """The fastest round of every way, and what its matrix products alone would take."""
    rates = {side.dtype: GemmRate(side.dtype, side.device) for side in sides.values()}
    memory = {
        name: with_peak_memory(lambda side=side: side.step(inputs), side.device)[1] for name, side in sides.items()
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(repeats):
        for rate in rates.values():
            rate.sample()
        for name, side in sides.items():
            found[name].append(timed_step(side, inputs))
    rows = []
    for name, side in sides.items():
        fastest = min(found[name], key=lambda seconds: seconds["step"])
        floor = counted_flops(lambda side=side: side.step(inputs)) / rates[side.dtype].fastest()
        rows.append(
            {"way": name, **fastest, "floor": floor, "step_over_floor": fastest["step"] / floor}
            | {"sampling_share": fastest["sampling"] / fastest["step"], "peak_mib": memory[name]}
        )
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--documents", type=int, default=8)
    add("--length", type=int, default=66)
    add("--repeats", type=int, default=5)
    add("--ways", choices=list(WAYS), nargs="+", default=list(WAYS))
    add("--model", help="a folder with the weights, instead of what `ebft fetch smollm2-135m` got")
    add("--tiny", action="store_true", help="a small random model, to try the code")
    add("--cpu-time", action="store_true", help="count CPU seconds of one thread: for a machine with other work")
    add("--output", type=Path, help="the JSON file")
    plan = parser.parse_args(arguments)
    if plan.cpu_time:
        Clock.count_cpu_seconds()
    preset = find_preset("smollm2", on_cuda=False)
    preset = replace(preset, weights=plan.model) if plan.model else preset
    preset = preset.shrunken() if plan.tiny else preset
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, preset.shape["vocab_size"], (plan.documents, plan.length), generator=generator)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sides = {
            name: ours(preset, positions=plan.length, folder=Path(folder), name=name, **WAYS[name])
            for name in plan.ways
        }
        for side in sides.values():
            side.trainer.args.ce_coef = CE_COEF
        rows = measure(sides, {"input_ids": ids}, plan.repeats)
    results = {
        "card": {
            "model": preset.weights or preset.description,
            "batch": f"{plan.documents} documents of {plan.length} tokens",
            "options": {**OPTIONS, "ce_coef": CE_COEF, "lora_r": LORA_RANK},
            "rounds": plan.repeats,
            **machine(torch.device("cpu")),
        },
        "ways": rows,
    }
    for row in rows:
        phases = "".join(f"{name} {row[name]:6.2f}  " for name in ("rollout", "features", "forward", "backward"))
        print(
            f"{row['way']:<32}{row['step']:7.2f} s   {phases}{row['step_over_floor']:5.2f} x floor   "
            f"sampling {row['sampling_share']:.1%}"
        )
    output = plan.output or RESULTS / f"short-documents-{preset.name}-cpu.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(rounded(results), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
