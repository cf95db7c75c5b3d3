"""One strided EBFT training step, ours beside axolotl 0.19.0's published trainer, and beside its own arithmetic.

    python -m benchmarks.strided_step                       # small model, both trainers and ours alone at more lengths
    python -m benchmarks.strided_step --preset smollm2      # 135M parameters; first `ebft fetch smollm2-135m`
    python -m benchmarks.strided_step --preset 1b           # 1B parameters with LoRA, for a GPU
    python -m benchmarks.strided_step --tiny --lengths 32   # the same code in seconds

A step is the forward and backward pass of the loss for one document. Both trainers run in this process, in turn, on
the same document with the same weights, options and type. At each length the first step of each is for warming up and
for memory; seconds are those of the median of the steps after it. The floor is what the matrix products that our step
executes would take at the rate of a large matrix product, measured between the rounds.

Prints a card, a table and one JSON line; writes JSON after every length and plots at the end. Numbers are worth having
from an idle machine only: the card says its load.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import published, report
from benchmarks.measuring import Clock, machine, peak_flops, within_free_memory
from benchmarks.presets import OPTIONS, document, find_preset
from benchmarks.recompilations import recompilations
from benchmarks.rounds import Rounds, measure
from benchmarks.sides import Side, ours, theirs
from benchmarks.train_overhead import train_overhead

RESULTS = Path(__file__).parent / "results"
WARM_UP_LENGTH = 64


def main(arguments: list[str] | None = None) -> None:
    plan = make_plan(arguments)
    with tempfile.TemporaryDirectory() as folder, within_free_memory(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        both, others = make_sides(plan, Path(folder))
        results = {"card": card(plan, both), "lengths": []}
        print(report.card(results["card"]) + "\n\n" + report.header(), flush=True)
        for side in both + others:  # thread pools, kernels and lazy imports belong to no length
            Rounds(side, document(plan.preset, WARM_UP_LENGTH, side.device)).warm_up()
        for length in sorted({*plan.lengths, *plan.alone}):
            sides = both if length in plan.lengths else both[:1]
            sides = sides + others if length in plan.variant_lengths else sides
            results["lengths"].append(measure(plan.preset, length, sides, plan.repeats))
            print(report.length(results["lengths"][-1]), flush=True)
            save(results, plan.output)
        print("\n" + report.growth(results["lengths"]))
        if plan.recompile_steps:
            shortest = min(plan.lengths + plan.alone)
            frames = {
                side.name: recompilations(side, plan.preset, shortest, plan.recompile_steps)
                for side in both[:1] + others
            }
            results["recompilations"] = {"steps": plan.recompile_steps, "frames": frames}
        if plan.overhead_steps:
            results["train"] = train_overhead(
                plan.preset, plan.dtypes[0], plan.overhead_length, plan.overhead_steps, Path(folder)
            )
        print(report.whole_runs(results))
    save(results, plan.output)
    draw(plan.output)
    print("\n" + json.dumps(rounded(results)))


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
    peak = peak_flops(device)
    return {
        "step": "forward and backward of the loss, one document",
        "document": "random tokens" if preset.weights is None else "the source code of Python's argparse",
        "model": preset.description,
        "dtype": plan.dtypes[0],
        "options": OPTIONS,
        **machine(device),
        "axolotl": plan.published,
        "mfu_of": f"{peak[0] / 1e12:.0f} TFLOP/s, {peak[1]}" if peak else "the measured rate of a matrix product",
    }


def save(results: dict[str, Any], output: Path) -> None:
    """Write what there is so far: a run that is cut off keeps it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(rounded(results), indent=2) + "\n", encoding="utf-8")


def draw(output: Path) -> None:
    """Plots beside the JSON file, where matplotlib is installed."""
    try:
        from benchmarks import plots
    except ImportError:
        print("No plots: matplotlib is not installed. Make them later: python -m benchmarks.plots FILE.json")
        return
    plots.draw(output)


def rounded(value: Any) -> Any:
    """The same structure with floats of six digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def make_plan(arguments: list[str] | None) -> argparse.Namespace:
    """What to measure: the command line, and the preset where it is silent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--preset", choices=["7m", "smollm2", "1b"], default="7m", help="the model")
    add("--model", help="a folder with the weights of preset smollm2, instead of what `ebft fetch smollm2-135m` got")
    add("--cpu-time", action="store_true", help="count CPU seconds of one thread: for a machine with other work")
    add("--tiny", action="store_true", help="shrink the model, to try the code")
    add("--lengths", type=int, nargs="+", help="document lengths for both trainers")
    add("--alone", type=int, nargs="*", help="document lengths for ours alone; none where --lengths is given")
    add("--dtypes", choices=["float32", "bfloat16"], nargs="+", help="the first for both, others for ours alone")
    add("--variant-lengths", type=int, nargs="*", default=[512, 1024], help="lengths of other types and ways of ours")
    add("--variants", nargs="*", metavar="NAME", help="the ways of ours to measure, of the preset's; all by default")
    add("--repeats", type=int, default=3, help="timed rounds of each length")
    add("--wheel", type=Path, help=f"the wheel of axolotl {published.VERSION}, where there is no package registry")
    add("--recompile-steps", type=int, default=20, help="steps with changing prompts in which compilations are counted")
    add("--overhead-steps", type=int, help="steps of a whole `ebft train` run, at least 4; 0 for none")
    add("--overhead-length", type=int, default=512, help="document length of that run")
    add("--output", type=Path, help="the JSON file; plots go beside it")
    plan = parser.parse_args(arguments)

    on_cuda = torch.cuda.is_available()
    preset = find_preset(plan.preset, on_cuda)
    if plan.cpu_time:
        Clock.count_cpu_seconds()
    if plan.model and preset.weights is None:
        parser.error(f"--model belongs to --preset smollm2: the weights of preset {preset.name} are random")
    preset = replace(preset, weights=plan.model) if plan.model else preset
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
    plan.output = plan.output or RESULTS / f"strided-step-{plan.preset.name}-{'cuda' if on_cuda else 'cpu'}.json"
    return plan


if __name__ == "__main__":
    main()
