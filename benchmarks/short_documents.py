"""A step on a batch of short documents at the size of a real model: LoRA and full, two types, the share of sampling.

    ebft fetch smollm2-135m
    python -m benchmarks.short_documents [--documents 8] [--length 66] [--cpu-time]

SmolLM2-135M with its own weights, random tokens, the options of strided_step.py and a cross-entropy term. Ways of
stepping take turns, and each has the seconds of its fastest round, to which other work on the machine adds least.
Sampling is everything between logits and sampled tokens: softmax, sampling, log-probability and its slope, entropy.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

import ebft.prefix.logps
from benchmarks import measuring
from benchmarks.flops import counted_flops
from benchmarks.presets import OPTIONS, find_preset
from benchmarks.sides import Side, ours

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
        watching.enter_context(measuring.stopwatch(ebft.prefix.logps, "_choose", "sampling", sampling, side.device))
        return {**side.timed_step(inputs), **sampling}


def measure(sides: dict[str, Side], inputs: dict[str, Tensor], repeats: int) -> list[dict[str, Any]]:
    """The fastest round of every way, and what its matrix products alone would take."""
    rates = {side.dtype: measuring.GemmRate(side.dtype, side.device) for side in sides.values()}
    peak = lambda side: measuring.with_peak_memory(lambda: side.step(inputs), side.device)[1]
    memory = {name: peak(side) for name, side in sides.items()}
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
    parser = measuring.parser_of(__doc__, repeats=5, cpu_time=True)
    add = parser.add_argument
    add("--documents", type=int, default=8)
    add("--length", type=int, default=66)
    add("--ways", choices=list(WAYS), nargs="+", default=list(WAYS))
    plan = parser.parse_args(arguments)
    if plan.cpu_time:
        measuring.Clock.count_cpu_seconds()
    preset = find_preset("smollm2", on_cuda=False)
    preset = preset.shrunken() if plan.tiny else preset
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, preset.shape["vocab_size"], (plan.documents, plan.length), generator=generator)
    with measuring.quiet_folder() as folder:
        sides = {
            name: ours(preset, positions=plan.length, folder=folder, name=name, **WAYS[name]) for name in plan.ways
        }
        for side in sides.values():
            side.trainer.args.ce_coef = CE_COEF
        rows = measure(sides, {"input_ids": ids}, plan.repeats)
    batch = f"{plan.documents} documents of {plan.length} tokens"
    card = {"model": preset.weights or preset.description, "batch": batch}
    card |= {"options": {**OPTIONS, "ce_coef": CE_COEF, "lora_r": LORA_RANK}, "rounds": plan.repeats}
    results = {"card": {**card, **measuring.machine(torch.device("cpu"))}, "ways": rows}
    for row in rows:
        phases = "".join(f"{name} {row[name]:6.2f}  " for name in ("rollout", "features", "forward", "backward"))
        print(
            f"{row['way']:<32}{row['step']:7.2f} s   {phases}{row['step_over_floor']:5.2f} x floor   "
            f"sampling {row['sampling_share']:.1%}"
        )
    measuring.store(plan.output or measuring.RESULTS / f"short-documents-{preset.name}-cpu.json", results)


if __name__ == "__main__":
    main()
