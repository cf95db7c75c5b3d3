"""The quickstart without a download: a small model, made here, learns texts of another kind from few examples.

The texts are nested brackets whose true probability is known (examples/quickstart/brackets.py), so what each method has
learned is measured exactly, and not by what it minimises.
"""

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer

from ebft.config.section import changed_keys
from ebft.examples.quickstart import brackets
from ebft.examples.quickstart.brackets import Brackets, Moved, first_error
from ebft.printed import safe_console
from ebft.run.config.schema import load_config
from ebft.run.training import train
from ebft.tools.quickstart.run import CONFIGS, Phases, console, make_once, moved, own_copy, save_summary, show_command

OUTPUT = Path("outputs/quickstart-tiny")  # what the two configs name
SHAPE = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXTS = 200
# What is trained from the base model: its title, what it changes in tiny.yaml, its share of the FLOPs.
RUNS: dict[str, tuple[str, list[str], float]] = {
    "sft": ("SFT", ["rl=", "ebft="], 1),
    "sft-tenth": ("SFT, a tenth of the FLOPs", ["rl=", "ebft="], 0.1),
    "ebft": ("EBFT with ce_coef 0.2", [], 1),
}


@dataclass(frozen=True)
class Scale:
    """Sizes, and what they change in tiny_base.yaml and tiny.yaml."""

    base: int  # texts of the base model
    measured: int  # texts and samples of a measurement
    flops: float = 2e11
    base_overrides: list[str] = field(default_factory=list)


SCALES = {"full": Scale(600 * 64, 1000), "test": Scale(256, 20, 2e10, ["max_steps=4", "warmup_steps=1"])}


def quickstart_tiny(output: Path, seed: int, scale: Scale, method: str) -> None:
    """Make the base model, train it in each of RUNS (with `method` "sft" without EBFT), measure all, and write
    summary.json and samples.txt."""
    runs = {name: run for name, run in RUNS.items() if method == "ebft" or name != "ebft"}
    torch.set_num_threads(1)  # more threads wait for each other longer than this model computes
    phases, source = Phases(count=3 + len(runs)), Moved()
    data, base = output / "data", output / "base"
    paths = {"base_model": "data/model", "datasets.0.path": "data/base.jsonl", "output_dir": "base"}
    changed = moved(output, OUTPUT, paths)
    base_file = own_copy(CONFIGS / "tiny_base.yaml", output)
    configs = {"base": load_config(base_file, [*changed, *scale.base_overrides])}

    def write() -> None:
        brackets.write_texts(data / "base.jsonl", brackets.draw(Brackets(), 0, scale.base))
        brackets.write_texts(data / "train.jsonl", brackets.draw(source, 10_000 + seed, TEXTS))
        brackets.save_random_model(data / "model", source.words, SHAPE)

    with phases.phase("base", "Base model: SFT from random weights on nested brackets with words in them"):
        made_from = [scale.base, SHAPE, dict(changed_keys(configs["base"]))]
        show_command(base_file, [*changed, *scale.base_overrides])
        make_once(data, [*made_from, seed], write)
        make_once(base, made_from, lambda: train(configs["base"]))
    for name, (title, overrides, share) in runs.items():
        folders = {"base_model": "base", "datasets.0.path": "data/train.jsonl"}
        overrides = [*moved(output, OUTPUT, folders), f"output_dir={output / name}", *overrides]
        flops = scale.flops * share
        overrides += [f"budget.flops={flops:g}"] * (flops != 2e11) + [f"seed={seed}"] * (seed > 0)
        with phases.phase(name, f"{title}: {TEXTS} texts with other shares of brackets and words, repeated"):
            file = own_copy(CONFIGS / "tiny.yaml", output)
            show_command(file, overrides)
            configs[name] = load_config(file, overrides)
            train(configs[name])

    with phases.phase("measure", f"{scale.measured:,} new texts and {scale.measured:,} samples of each model"):
        texts = brackets.draw(source, 999, scale.measured)
        found = {name: measured(output / name, texts) for name in ("base", *runs)}
    with phases.phase("report", f"Result, seed {seed}"):
        with (output / "samples.txt").open("w", encoding="utf-8") as file:
            for page in (console, safe_console(file=file, width=140)):
                for name, measures in found.items():
                    page.print(f"\n{name}", *map(marked, measures["samples"]), sep="\n", highlight=False)
        console.print("", table_of(found))
    save_summary(output / "summary.json", configs, phases.seconds, seed=seed, models=found)
    console.print(f"All of it took {sum(phases.seconds.values()) / 60:.1f} minutes.")
    console.print("\nYour own MODEL and DATA:\n  ebft init DATA --model MODEL\n  ebft train run.yaml", highlight=False)


def measured(folder: Path, texts: list[list[str]]) -> dict[str, Any]:
    """KL(source || model) of a text with its error, the share of valid samples, their words before an error or end."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = brackets.ids_of(AutoTokenizer.from_pretrained(folder), source := Moved())
    divergences, samples = brackets.kl(model, ids, source, texts)[1.0], brackets.sampled(model, ids, len(texts))
    errors = [first_error(source, sample) for sample in samples]
    return {
        "kl": statistics.fmean(divergences),
        "kl_error": statistics.stdev(divergences) / len(divergences) ** 0.5,
        "valid": errors.count(None) / len(errors),
        "words": statistics.fmean(len(text) if e is None else e for text, e in zip(samples, errors)),
        "samples": [" ".join(sample) for sample in samples if len(sample) <= 14][:3],
    }


def marked(sample: str) -> Text:
    """A sample up to its first error, which is marked, or whole."""
    words = sample.split()
    if (error := first_error(Moved(), words)) is None:
        return Text(f"  {sample}")
    wrong = ([*words, "(ends)"][error], "bold red")
    return Text.assemble("  ", " ".join([*words[:error], ""]), wrong, (" <- error", "red"))


def table_of(found: dict[str, dict[str, Any]]) -> Table:
    """A row for each model."""
    caption = "KL: from the true distribution of texts, in nats; 0 is best. Words: before an error or the end."
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, caption=caption, caption_justify="left")
    for column in ("model", "KL ± standard error", "valid samples", "words"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, row in found.items():
        title = "base model" if name == "base" else RUNS[name][0]
        table.add_row(title, f"{row['kl']:.2f} ± {row['kl_error']:.2f}", f"{row['valid']:.1%}", f"{row['words']:.1f}")
    return table
