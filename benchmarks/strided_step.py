"""One strided EBFT training step, ours beside axolotl 0.19.0's published trainer, and beside its own arithmetic.

    python -m benchmarks.strided_step                       # small model, both trainers and ours alone at more lengths
    python -m benchmarks.strided_step --preset smollm2      # 135M parameters; first `ebft fetch smollm2-135m`
    python -m benchmarks.strided_step --preset 1b           # 1B parameters with LoRA, for a GPU
    python -m benchmarks.strided_step --tiny --lengths 32   # the same code in seconds

A step is the forward and backward pass of the loss for one document. Both trainers run in this process, in turn, on
the same document with the same weights, options and type. At each length the first step of each is for warming up and
for memory; seconds are those of the median of the steps after it. The floor is what the matrix products that our step
executes would take at the rate of a large matrix product, measured between the rounds.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import measuring, published
from benchmarks.presets import OPTIONS, Preset, document, find_preset
from benchmarks.rounds import Rounds, measure
from benchmarks.sides import PHASES, Side, ours, theirs
from benchmarks.train_overhead import train_overhead

WARM_UP_LENGTH = 64
_SECONDS = (*PHASES, "step", "floor")
WARM_UP_STEPS = 3  # torch.compile makes a size dynamic when it has seen a second value of it


def main(arguments: list[str] | None = None) -> None:
    plan = make_plan(arguments)
    with measuring.quiet_folder() as folder, measuring.within_free_memory():
        both, others = make_sides(plan, folder)
        results = {"card": card(plan, both), "lengths": []}
        print(card_text(results["card"]) + "\n\n" + header(), flush=True)
        for side in both + others:  # thread pools, kernels and lazy imports belong to no length
            Rounds(side, document(plan.preset, WARM_UP_LENGTH, side.device)).warm_up()
        for length in sorted({*plan.lengths, *plan.alone}):
            sides = both if length in plan.lengths else both[:1]
            sides = sides + others if length in plan.variant_lengths else sides
            results["lengths"].append(measure(plan.preset, length, sides, plan.repeats))
            print(length_text(results["lengths"][-1]), flush=True)
            measuring.store(plan.output, results)
        print("\n" + growth(results["lengths"]))
        if plan.recompile_steps:
            shortest = min(plan.lengths + plan.alone)
            frames = {
                side.name: recompilations(side, plan.preset, shortest, plan.recompile_steps)
                for side in both[:1] + others
            }
            results["recompilations"] = {"steps": plan.recompile_steps, "frames": frames}
        if plan.overhead_steps:
            results["train"] = train_overhead(
                plan.preset, plan.dtypes[0], plan.overhead_length, plan.overhead_steps, folder
            )
        print(whole_runs(results))
    measuring.store(plan.output, results)
    draw(plan.output)
    print("\n" + json.dumps(measuring.rounded(results)))


def recompilations(side: Side, preset: Preset, length: int, steps: int) -> int:
    """Frames that TorchDynamo compiled in `steps` steps, each with another prompt length, after warming up."""
    from torch._dynamo.utils import counters  # slow to import where nothing is compiled

    inputs = document(preset, length, side.device)
    room = length - OPTIONS["generate_max_len"] - OPTIONS["context_length"]
    for index in range(WARM_UP_STEPS + steps):
        if index == WARM_UP_STEPS:
            before = counters["frames"]["total"]
        prompt = OPTIONS["context_length"] + index * room // (WARM_UP_STEPS + steps)
        side.step({**inputs, "prompt_length": torch.tensor([prompt], device=side.device)})
    return counters["frames"]["total"] - before


def make_sides(plan: argparse.Namespace, folder: Path) -> tuple[list[Side], list[Side]]:
    """Ours and the published trainer, which is missing where it can not be had; and ours in other types and ways."""
    positions = max(plan.lengths + plan.alone + [WARM_UP_LENGTH])
    both = [ours(plan.preset, plan.dtypes[0], positions, folder)]
    try:
        trainer_class = published.load_trainer(plan.wheel)
        both.append(theirs(plan.preset, plan.dtypes[0], positions, folder, trainer_class))
    except published.NotAvailable as reason:
        plan.published = f"not measured: {reason}"
        print(f"axolotl {published.VERSION} is {plan.published}")
    others = [ours(plan.preset, dtype, positions, folder, name=f"ours {dtype}") for dtype in plan.dtypes[1:]]
    for name, settings in plan.preset.variants.items():
        settings = {"dtype": plan.dtypes[0], **settings}
        others.append(ours(plan.preset, positions=positions, folder=folder, name=name, **settings))
    return both, others


def card(plan: argparse.Namespace, sides: list[Side]) -> dict[str, Any]:
    """What was measured, on what."""
    device, preset = sides[0].device, plan.preset
    peak = measuring.peak_flops(device)
    return {
        "step": "forward and backward of the loss, one document",
        "document": "random tokens" if preset.weights is None else "the source code of Python's argparse",
        "model": preset.description,
        "dtype": plan.dtypes[0],
        "options": OPTIONS,
        **measuring.machine(device),
        "axolotl": plan.published,
        "mfu_of": f"{peak[0] / 1e12:.0f} TFLOP/s, {peak[1]}" if peak else "the measured rate of a matrix product",
    }


def draw(output: Path) -> None:
    """Plots beside the JSON file, where matplotlib is installed."""
    try:
        from benchmarks import plots
    except ImportError:
        print("No plots: matplotlib is not installed. Make them later: python -m benchmarks.plots FILE.json")
        return
    plots.draw(output)


def card_text(facts: dict[str, Any]) -> str:
    """One line for each fact."""
    lines = {name: value for name, value in facts.items() if value is not None}
    lines["options"] = ", ".join(f"{name} {value}" for name, value in facts["options"].items())
    return "\n".join(f"{name:>14}  {value}" for name, value in lines.items())


def header() -> str:
    """The columns of `length`. Seconds, unless the name says otherwise."""
    columns = "".join(f"{name:>10}" for name in _SECONDS)
    return f"{'tokens':>6}  {'':<15}{'rounds':>6}{columns}{'/ floor':>9}{'peak MiB':>10}{'tokens/s':>10}{'MFU':>7}"


def length_text(result: dict[str, Any]) -> str:
    """A row for each side, and what they are to ours."""
    sides = result["sides"]
    lines = [_row(result["length"], name, row) for name, row in sides.items()]
    reference = sides["ours"]
    for name, row in sides.items():
        if name != "ours" and row["rounds"]:
            both = row["peak_mib"] and reference["peak_mib"]
            memory = f", {row['peak_mib'] / reference['peak_mib']:.2f} x memory" if both else ""
            lines.append(f"{'':>8}{name} / ours: {row['step'] / reference['step']:.2f} x time{memory}")
    return "\n".join(lines)


def _row(tokens: int, name: str, row: dict[str, Any]) -> str:
    start = f"{tokens:>6}  {name:<15}{row['rounds']:>6}"
    if not row["rounds"]:
        return f"{start}  failed: {row['failed']}"
    seconds = "".join(f"{row[column]:>10.3f}" if column in row else " " * 10 for column in _SECONDS)
    floor = f"{row['step_over_floor']:.2f}" if "step_over_floor" in row else ""
    memory = "" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
    return f"{start}{seconds}{floor:>9}{memory:>10}{row['tokens_per_s']:>10.0f}{row['mfu']:>7.1%}"


def growth(results: list[dict[str, Any]]) -> str:
    """How ours grows with the document: time beside FLOPs, memory beside tokens."""
    columns = ("tokens", "counted GFLOP", "needed GFLOP", "GEMM GFLOP/s", "ms / GFLOP", "KiB / token")
    lines = ["ours, by length:", "".join(f"{name:>15}" for name in columns)]
    for result in results:
        row = result["sides"]["ours"]
        values = (
            f"{result['length']}",
            f"{row['counted_gflop']:.1f}",
            f"{sum(result['needed_gflop'].values()):.1f}",
            f"{result['gemm_gflops'][row['dtype']]:.0f}",
            f"{1000 * row['step'] / row['counted_gflop']:.2f}",
            "" if row["peak_mib"] is None else f"{1024 * row['peak_mib'] / result['length']:.0f}",
        )
        lines.append("".join(f"{value:>15}" for value in values))
    return "\n".join(lines)


def whole_runs(results: dict[str, Any]) -> str:
    """What was found out beside the steps, a line each."""
    lines = []
    if "recompilations" in results:
        found = results["recompilations"]
        frames = ", ".join(f"{name} {count}" for name, count in found["frames"].items())
        lines.append(f"frames compiled again in {found['steps']} steps with changing prompts: {frames}")
    if "train" in results:
        found = results["train"]
        lines.append(
            f"ebft train at {found['length']} tokens: {found['whole']:.3f} s a step, of which {found['inside']:.3f} s "
            f"are its loss and gradients ({found['ratio']:.2f} x)"
        )
    return "\n".join(lines)


def make_plan(arguments: list[str] | None) -> argparse.Namespace:
    """What to measure: the command line, and the preset where it is silent."""
    parser = measuring.parser_of(__doc__, repeats=3, cpu_time=True)
    add = parser.add_argument
    add("--preset", choices=["7m", "smollm2", "1b"], default="7m", help="the model")
    add("--lengths", type=int, nargs="+", help="document lengths for both trainers")
    add("--alone", type=int, nargs="*", help="document lengths for ours alone; none where --lengths is given")
    add("--dtypes", choices=["float32", "bfloat16"], nargs="+", help="the first for both, others for ours alone")
    add("--variant-lengths", type=int, nargs="*", default=[512, 1024], help="lengths of other types and ways of ours")
    add("--variants", nargs="*", metavar="NAME", help="the ways of ours to measure, of the preset's; all by default")
    add("--wheel", type=Path, help=f"the wheel of axolotl {published.VERSION}, where there is no package registry")
    add("--recompile-steps", type=int, default=20, help="steps with changing prompts in which compilations are counted")
    add("--overhead-steps", type=int, help="steps of a whole `ebft train` run, at least 4; 0 for none")
    add("--overhead-length", type=int, default=512, help="document length of that run")
    plan = parser.parse_args(arguments)

    on_cuda = torch.cuda.is_available()
    preset = find_preset(plan.preset, on_cuda)
    if plan.cpu_time:
        measuring.Clock.count_cpu_seconds()
    plan.preset, plan.published = preset.shrunken() if plan.tiny else preset, published.VERSION
    if unknown := set(plan.variants or []) - set(preset.variants):
        parser.error(f"preset {preset.name} has no variant {min(unknown)!r}; it has {', '.join(preset.variants)}")
    if plan.variants is not None:
        plan.preset = replace(plan.preset, variants={name: preset.variants[name] for name in plan.variants})
    if plan.alone is None:
        plan.alone = [] if plan.lengths else list(preset.alone)
    plan.lengths = plan.lengths or list(preset.lengths)
    plan.dtypes = plan.dtypes or list(preset.dtypes)
    if plan.overhead_steps is None:
        plan.overhead_steps = preset.overhead_steps
    if plan.repeats < 1 or 0 < plan.overhead_steps < 4:
        parser.error("--repeats must be at least 1, and --overhead-steps 0 or at least 4")
    name = f"strided-step-{plan.preset.name}-{'cuda' if on_cuda else 'cpu'}.json"
    plan.output = plan.output or measuring.RESULTS / name
    return plan


if __name__ == "__main__":
    main()
