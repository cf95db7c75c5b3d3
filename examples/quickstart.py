"""Energy-based fine-tuning from nothing: on two CPU cores, in a few minutes, without a network.

Makes a small language model of Python code from the source of the standard library, fine-tunes it by strided EBFT on
the docstrings of files that it never saw, and measures it before and after on those of yet other files.
`make quickstart`, or:

    python examples/quickstart.py [--seed 1] [--output outputs/quickstart]
"""

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

# Before torch is imported: threads that spin while they wait take the cores from whoever else uses the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from quickstart.corpus import PARTS, write_corpus  # noqa: E402
from quickstart.phases import Phases, console, make_once  # noqa: E402
from quickstart.scale import SCALES, Scale  # noqa: E402

CONFIGS = Path(__file__).parent / "quickstart"
DEFAULT_OUTPUT = Path("outputs/quickstart")


def main() -> int:
    """Run the quickstart; returns the exit status."""
    arguments = read_arguments()
    try:
        quickstart(arguments.output, arguments.seed, SCALES[arguments.scale])
    except KeyboardInterrupt as stop:
        console.print(f"\n[yellow]{stop}\nStopped. The phases that finished are kept: run the same command to go on.")
        return 130
    except (ValueError, OSError) as error:
        console.print("\n[bold red]Error:[/]", str(error), markup=False, highlight=False)
        return 2
    return 0


def quickstart(output: Path, seed: int, scale: Scale) -> None:
    """Text, tokenizer, base model, measurement, energy-based fine-tuning, measurement, report."""
    console.print(f"[bold]Energy-based fine-tuning, seed {seed}.[/] Everything made goes to {output}.")
    console.print("Loading PyTorch ...")
    from quickstart import report
    from quickstart.base_model import save_random_model
    from quickstart.measure import held_out_windows, measure
    from transformers import AutoModelForCausalLM

    from ebft import load_config, train
    from ebft.config.changed import changed_keys
    from ebft.features import FeatureNetwork
    from ebft.models import load_tokenizer

    data, init, base = output / "data", output / "init", output / "base"
    base_run = [CONFIGS / "base.yaml", base_overrides(output, scale)]
    ebft_run = [CONFIGS / "ebft.yaml", ebft_overrides(output, seed, scale)]
    base_config, ebft_config = load_config(*base_run), load_config(*ebft_run)
    phases = Phases(count=7)

    with phases.phase("data", "Text: the source of this machine's Python standard library"):
        made_from: list[Any] = [sys.version, scale.max_files, PARTS]
        make_once(data, made_from, lambda: write_corpus(data, scale.max_files))

    with phases.phase("init", "A tokenizer, and a small Llama with random weights"):
        made_from += [scale.vocab_size, scale.shape, base_config.sequence_len]
        make_once(
            init, made_from, lambda: save_random_model(init, data / "base.jsonl", scale, base_config.sequence_len)
        )

    with phases.phase("base", "Base model: plain pretraining on source code"):
        made_from += [dict(changed_keys(base_config))]
        show_command(*base_run)
        make_once(base, made_from, lambda: train(base_config))

    with phases.phase("before", "Docstrings of held-out files, before"):
        policy = AutoModelForCausalLM.from_pretrained(base)
        network = FeatureNetwork(policy, ebft_config.ebft.feature_layers, ebft_config.ebft.embed_method)
        held_out = held_out_windows(ebft_config, load_tokenizer(ebft_config), scale.groups)
        before = measure(policy, network, held_out)

    with phases.phase("ebft", "Energy-based fine-tuning with LoRA, on docstrings of files that the base never saw"):
        show_command(*ebft_run)
        result = train(ebft_config)

    with phases.phase("after", "Docstrings of held-out files, after: the same windows, noise and feature network"):
        after = measure(result.model, network, held_out)

    with phases.phase("report", f"Result, seed {seed}: {len(held_out)} windows of {ebft_config.sequence_len} tokens"):
        console.print(report.result_table(before, after))
        report.save_curves(result.trainer.state.log_history, output / "curves.png", seed)
    configs = {"base": base_config, "ebft": ebft_config}
    report.save_summary(output / "summary.json", seed, before, after, configs, phases.seconds)
    what_next(output, ebft_run)


def base_overrides(output: Path, scale: Scale) -> list[str]:
    """What base.yaml does not say: another output folder, the test's sizes."""
    moved = [
        f"base_model={output / 'init'}",
        f"datasets.0.path={output / 'data' / 'base.jsonl'}",
        f"output_dir={output / 'base'}",
    ]
    return [*(moved if output != DEFAULT_OUTPUT else []), *scale.base_overrides]


def ebft_overrides(output: Path, seed: int, scale: Scale) -> list[str]:
    """What ebft.yaml does not say: another output folder, another seed, the test's sizes."""
    moved = [
        f"base_model={output / 'base'}",
        f"datasets.0.path={output / 'data' / 'ebft.jsonl'}",
        f"test_datasets.0.path={output / 'data' / 'held_out.jsonl'}",
        f"output_dir={output / 'ebft'}",
    ]
    changed = [f"seed={seed}"] if seed else []
    return [*(moved if output != DEFAULT_OUTPUT else []), *changed, *scale.ebft_overrides]


def command_line(config: Path, overrides: list[str]) -> str:
    """The `ebft train` command that does what this script does in its own process."""
    return shlex.join(["ebft", "train", os.path.relpath(config), *overrides])


def show_command(config: Path, overrides: list[str]) -> None:
    """Print the command that a phase stands for."""
    console.print("[dim]the same as:[/]", command_line(config, overrides), style="bold", highlight=False)


def what_next(output: Path, ebft_run: list[Any]) -> None:
    """Where everything is, and how to go on with one's own text."""
    console.print(f"\nTable and settings: {output / 'summary.json'}")
    console.print(f"Training curves:    {output / 'curves.png'}")
    console.print(f"Trained adapter:    {output / 'ebft'}")
    console.print("\nNext, your own text (a JSONL file with a column `text`, or a folder of text files):")
    own = ["datasets.0.path=my_texts.jsonl", "test_datasets=[]", "output_dir=outputs/mine"]
    console.print(f"  {command_line(ebft_run[0], own)}", style="bold", highlight=False)
    console.print("and your own model, a folder or a hub name: base_model=...   `ebft config` explains every key.")


def read_arguments() -> argparse.Namespace:
    """Seed, output folder, and the size that the script's test asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of fine-tuning and measurement (default 0)")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help=f"folder (default {DEFAULT_OUTPUT})")
    parser.add_argument("--scale", choices=SCALES, default="full", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
