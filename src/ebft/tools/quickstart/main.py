"""The quickstart from start to end: model and text, measurement, fine-tuning, measurement, report.

Before and after are measured in one fixed feature space: the space of the frozen base model.
"""

import math
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import stdev
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.progress import track
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ebft import anchors, features, printed
from ebft.data.documents import DocumentCollator, block_options
from ebft.data.load import load_token_rows
from ebft.models import causal_lm, load, pretrained
from ebft.prefix.cpu import keep_freed_memory
from ebft.run.config.schema import load_config
from ebft.run.training import train
from ebft.strided.held_out import held_out_metrics
from ebft.structured.rollouts.local import Generator
from ebft.structured.rollouts.turns import Sampling
from ebft.tools.quickstart import run as common
from ebft.tools.quickstart import smollm2, tiny

TINY = "tiny"
METHODS = {"ebft": "Energy-based fine-tuning", "sft": "Supervised fine-tuning"}


def quickstart(model: str, output: Path | None, seed: int, scale: str, method: str = "ebft") -> None:
    """Model and text, measurement, energy-based fine-tuning (or SFT, with `method` "sft"), measurement, report."""
    keep_freed_memory()
    title = METHODS[method]
    default = tiny.OUTPUT if model == TINY else smollm2.OUTPUT
    output = output or (default if method == "ebft" else default.with_name(f"{default.name}-{method}"))
    common.console.print(f"[bold]{title}, seed {seed}.[/] Everything made goes to {escape(str(output))}.")
    common.check_output(output)
    if model == TINY:
        tiny.quickstart_tiny(output, seed, tiny.SCALES[scale], method)
        return
    common.own_copy(common.CONFIGS / "smollm2.yaml", output)
    phases = common.Phases(count=6)
    run = smollm2.prepare_smollm2(phases, output, seed, model, scale)
    if method == "sft":
        run = replace(run, overrides=[*run.overrides, "rl="])
    config = load_config(run.config_file, run.overrides)
    tokenizer = pretrained.load_tokenizer(config)

    with phases.phase("before", "Held-out files, before"):
        policy = load.load_base_model(config, tokenizer)
        network = features.FeatureNetwork(policy, config.ebft.feature_layers, config.ebft.embed_method)
        held_out = held_out_documents(config, tokenizer, run.groups)
        chosen = [held_out.rows[index * len(held_out.rows) // COUNT] for index in range(COUNT)]  # at equal distances
        parts = [(row["input_ids"], row["prompt_length"] or WINDOW_PROMPT) for row in chosen]
        prompts, references = zip(*((ids[:start], ids[start : start + LONGEST]) for ids, start in parts))
        before = measure(policy, network, held_out)
        written_before = greedy_completions(policy, tokenizer, prompts)

    with phases.phase(method, f"{title} with LoRA"):
        common.show_command(run.config_file, run.overrides)
        result = train(config)

    with phases.phase("after", "Held-out files, after: the same documents, noise and feature network"):
        after = measure(result.model, network, held_out)
        written_after = greedy_completions(result.model, tokenizer, prompts)

    with phases.phase("report", f"Result, seed {seed}: {len(held_out.rows)} documents of held-out files"):
        texts = map(tokenizer.decode, prompts), written_before, written_after, map(tokenizer.decode, references)
        shown = [dict(zip(("prompt", "before", "after", "reference"), sample)) for sample in zip(*texts)]
        with (output / "samples.txt").open("w", encoding="utf-8") as file:
            for page in (common.console, printed.safe_console(file=file, width=140)):
                for sample in shown:
                    page.print(side_by_side(sample, page.width), "", soft_wrap=False)
        common.console.print(result_table(before, after))
    found = {"before": means(before), "after": means(after), "samples": shown}
    found["change_standard_error"] = change_errors(before, after)
    common.save_summary(output / "summary.json", {method: config}, phases.seconds, seed=seed, **found)
    common.console.print(f"All of it took {sum(phases.seconds.values()) / 60:.1f} minutes.")
    print_next_steps(output, run, shown[0]["prompt"])


FILES = (
    ("Table, settings, samples", "summary.json"),
    ("Samples side by side", "samples.txt"),
    ("Training curves", "ebft/report.html"),
    ("Trained LoRA adapter", "ebft"),
)


def print_next_steps(output: Path, run: common.Run, prompt: str) -> None:
    """Print the files of the run, and what to do with one's own text and with the adapter."""
    common.console.print()
    for what, file in FILES:
        if (output / file).exists():  # SFT has another folder
            common.console.print(f"{what + ':':26}{output / file}", highlight=False)
    if shutil.which("ebft") is None:
        activate = os.path.relpath(Path(sys.prefix) / "bin" / "activate")
        _show("\nTo have the command `ebft` in this shell:", f"source {activate}")
    config = load_config(run.config_file, run.overrides)
    own = f"ebft init DATA --model {shlex.quote(config.base_model)}"
    _show("\nTrain it on your own DATA, a file of rows or a folder of texts:", f"{own}\nebft train run.yaml")
    options = [*run.overrides, "--output", str(output / "evaluation.json")]
    _show("Evaluate the adapter beside the base model:", common.command_line("evaluate", run.config_file, options))
    dtype = str(load.weights_dtype(config)).removeprefix("torch.")
    program = f"""\
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer
model = AutoPeftModelForCausalLM.from_pretrained("{output / "ebft"}", dtype="{dtype}")
tokenizer = AutoTokenizer.from_pretrained("{output / "ebft"}")
inputs = tokenizer({prompt!r}, return_tensors='pt')
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=48)[0]))"""
    _show("\nUse the adapter in Python:", program)  # in the dtype of training
    common.console.print("\nEvery key of a config: ebft config. Your own model, a folder or a hub id: base_model=...")


def _show(what: str, lines: str) -> None:
    common.console.print(what, highlight=False)
    for line in lines.split("\n"):
        common.console.print(f"  {line}", style="bold", highlight=False, markup=False)


# Metric, which way is better. Metrics that each model whitens by its own samples cannot be compared, and are not here.
METRICS = (("cfm_loss", "down"), ("alignment", "up"), ("diversity", "down"), ("ce_loss", "down"))


def result_table(before: list[dict[str, float]], after: list[dict[str, float]]) -> Table:
    """Each metric before and after, and its change with the standard error over groups of documents."""
    caption = "change ± its standard error over groups of documents; a verdict needs twice that"
    table = Table(
        box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True, caption=caption, caption_justify="left"
    )
    table.add_column("held out", no_wrap=True)
    for column in ("before", "after", "change", "aim", ""):
        table.add_column(column, justify="right", no_wrap=True)
    old, new = means(before), means(after)
    spread = change_errors(before, after)
    for name, wanted in METRICS:
        change = new[name] - old[name]
        shown = f"{change:+.2g} ± {spread[name]:.1g}"
        verdict = "[green]better" if (change > 0) == (wanted == "up") else "[red]worse"
        if math.isnan(spread[name]) or abs(change) < 2 * spread[name]:
            verdict = "[yellow]no change larger than its error"
        table.add_row(name, f"{old[name]:.4g}", f"{new[name]:.4g}", shown, wanted, verdict)
    return table


DOCUMENTS_PER_GROUP = 8


@dataclass
class HeldOutText:
    """Documents of held-out files, in groups, with the settings that every measurement shares."""

    rows: list[dict[str, Any]]
    groups: list[dict[str, Tensor]]  # the rows, collated
    block_options: anchors.BlockOptions
    seed: int


def held_out_documents(config: Any, tokenizer: Any, groups: int) -> HeldOutText:
    """`groups` x DOCUMENTS_PER_GROUP documents of the config's `test_datasets`, spread evenly over its files.

    Rows without a prompt are windows of a longer text, and only full windows of `sequence_len` tokens are taken.
    """
    rows = load_token_rows(config, tokenizer).evaluation
    usable = [row for row in rows if row["prompt_length"] or len(row["input_ids"]) == config.sequence_len]
    count = min(groups, len(usable) // DOCUMENTS_PER_GROUP)
    wanted = count * DOCUMENTS_PER_GROUP
    chosen = [usable[i * len(usable) // wanted] for i in range(wanted)]
    collate = DocumentCollator(tokenizer.pad_token_id)
    parts = [collate(chosen[i::count]) for i in range(count)]  # each group mixes many files
    blocks = replace(block_options(config, config.ebft, tokenizer), merge_rollouts=None)
    return HeldOutText(chosen, parts, blocks, config.seed)


def measure(model: Any, network: features.FeatureNetwork, held_out: HeldOutText) -> list[dict[str, float]]:
    """The held-out metrics of `model` in each group of documents; the same noise samples each time it is called."""
    return [
        held_out_metrics(model, network, [group], block_options=held_out.block_options, seed=held_out.seed)
        for group in track(held_out.groups, description="sampling and comparing")
    ]


def means(groups: list[dict[str, float]]) -> dict[str, float]:
    """Each metric over all groups."""
    return {name: sum(group[name] for group in groups) / len(groups) for name in groups[0]}


def change_errors(before: list[dict[str, float]], after: list[dict[str, float]]) -> dict[str, float]:
    """The standard error of the change of each mean, paired by group; NaN for one group."""
    changes = {name: [new[name] - old[name] for old, new in zip(before, after)] for name in before[0]}
    count = len(before)
    return {name: stdev(each) / math.sqrt(count) if count > 1 else math.nan for name, each in changes.items()}


COUNT = 3  # prompts whose completions are shown
LONGEST = 48  # tokens of these completions
WINDOW_PROMPT = 32  # tokens of a window of a longer text that serve as its prompt
NARROWEST = 110  # characters of a line that has room for three columns of code


@torch.no_grad()
def greedy_completions(model: Any, tokenizer: Any, prompts: Sequence[list[int]]) -> list[str]:
    """What `model` writes greedily after each prompt, up to LONGEST tokens, with the end-of-text token if any."""
    greedy = Generator(Sampling(temperature=0.0, end_ids=frozenset([tokenizer.eos_token_id])), tokenizer.pad_token_id)
    with causal_lm.evaluating(model):
        return [tokenizer.decode(one.ids) for one in greedy(model, prompts, [LONGEST] * len(prompts))]


def side_by_side(sample: dict[str, str], width: int) -> RenderableType:
    """The prompt, and below it the continuations in columns; below each other where `width` has no room for columns."""
    shown = {title: Text(text.strip("\n"), overflow="fold") for title, text in sample.items() if title != "prompt"}
    if width < NARROWEST:
        parts: RenderableType = Group(*(Panel(text, title=title, title_align="left") for title, text in shown.items()))
    else:
        parts = Table(width=width)
        for title in shown:
            parts.add_column(title, ratio=1)
        parts.add_row(*shown.values())
    return Group(Text(sample["prompt"], style="bold"), parts)
