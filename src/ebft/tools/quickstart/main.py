"""The quickstart from start to end: model and text, measurement, fine-tuning, measurement, report."""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from ebft.config.load import load_config
from ebft.features import FeatureNetwork
from ebft.models.load import load_base_model, weights_dtype
from ebft.models.tokenizer import load_tokenizer
from ebft.run.training import train
from ebft.tools.quickstart import report, smollm2, tiny
from ebft.tools.quickstart.measure import (
    choose_prompts,
    complete,
    held_out_documents,
    make_samples,
    measure,
    save_samples,
    side_by_side,
)
from ebft.tools.quickstart.run import (
    CONFIGS,
    Phases,
    Run,
    check_output,
    command_line,
    console,
    keep_freed_memory,
    own_copy,
    show_command,
)

TINY = "tiny"
METHODS = {"ebft": "Energy-based fine-tuning", "sft": "Supervised fine-tuning"}
LONGEST = 48  # tokens of the completions that are shown


def quickstart(model: str, output: Path | None, seed: int, scale: str, method: str = "ebft") -> None:
    """Model and text, measurement, energy-based fine-tuning (or SFT, with `method` "sft"), measurement, report."""
    keep_freed_memory()
    title = METHODS[method]
    default = tiny.OUTPUT if model == TINY else smollm2.OUTPUT
    output = output or (default if method == "ebft" else default.with_name(f"{default.name}-{method}"))
    console.print(f"[bold]{title}, seed {seed}.[/] Everything made goes to {output}.")
    check_output(output)
    own_copy(CONFIGS / ("tiny.yaml" if model == TINY else "smollm2.yaml"), output)
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
        prompts = choose_prompts(held_out.rows, LONGEST)
        before = measure(policy, network, held_out)
        written_before = complete(policy, tokenizer, prompts, LONGEST)

    with phases.phase(method, f"{title} with LoRA"):
        show_command(run.config_file, run.overrides)
        result = train(config)

    with phases.phase("after", "Held-out files, after: the same documents, noise and feature network"):
        after = measure(result.model, network, held_out)
        written_after = complete(result.model, tokenizer, prompts, LONGEST)

    with phases.phase("report", f"Result, seed {seed}: {len(held_out)} documents of held-out files"):
        shown = make_samples(tokenizer, prompts, written_before, written_after)
        for sample in shown:
            console.print(side_by_side(sample, console.width), "", soft_wrap=False)
        console.print(report.result_table(before, after))
        save_samples(shown, output / "samples.txt")
        curves = result.trainer.state.log_history
        heading = f"{title}, {model}, seed {seed}"
        report.save_curves(curves, output / "curves.png", heading, config.ebft.use_whitening)
    configs = {**run.earlier, method: config}
    report.save_summary(output / "summary.json", seed, before, after, configs, map(vars, shown), phases.seconds)
    console.print(f"All of it took {sum(phases.seconds.values()) / 60:.1f} minutes.")
    what_next(output, run, shown[0].prompt)


ROWS, TEXT = "ebft_strided_structured.transform", "ebft_pretrain.transform"
FILES = (
    ("Table, settings, samples", "summary.json"),
    ("Samples side by side", "samples.txt"),
    ("Training curves", "curves.png"),
    ("Trained LoRA adapter", "ebft"),
)


def what_next(output: Path, run: Run, prompt: str) -> None:
    """Print the files of the run, and what to do with one's own text and with the adapter."""
    console.print()
    for what, file in FILES:
        if (output / file).exists():  # there are no curves without matplotlib
            console.print(f"{what + ':':26}{output / file}", highlight=False)
    if shutil.which("ebft") is None:
        _show("\nTo have the command `ebft` in this shell:", activate_line())
    _show("\nTrain on your own rows {input, output}:", train_line(run, "my_rows.jsonl", ROWS))
    _show("or on your own text, a folder of files:", train_line(run, "my_texts/", TEXT))
    _show("Evaluate the adapter beside the base model:", evaluate_line(output, run))
    _show("\nUse the adapter in Python:", python_lines(output / "ebft", prompt, _dtype(run)))
    console.print("\nEvery key of a config: ebft config. Your own model, a folder or a hub id: base_model=...")


def activate_line() -> str:
    """What puts this environment's commands on the path."""
    return f"source {os.path.relpath(Path(sys.prefix) / 'bin' / 'activate')}"


def train_line(run: Run, path: str, kind: str) -> str:
    """The command that trains the same model in the same way on the data at `path`, read by the transform `kind`."""
    held_out = ["test_datasets=[]", "val_set_size=0.1"]
    own = [f"datasets.0.path={path}", f"datasets.0.type={kind}", *held_out, "output_dir=outputs/mine"]
    kept = [line for line in run.overrides if not line.startswith(("datasets", "test_datasets", "output_dir"))]
    return command_line("train", run.config_file, [*kept, *own])


def evaluate_line(output: Path, run: Run) -> str:
    """The command that measures the base model and the trained adapter."""
    return command_line("evaluate", run.config_file, [*run.overrides, "--output", str(output / "evaluation.json")])


def python_lines(adapter: Path, prompt: str, dtype: str) -> str:
    """A program that loads the adapter with its base model in the dtype of training, and continues a prompt."""
    return "\n".join(
        (
            "from peft import AutoPeftModelForCausalLM",
            "from transformers import AutoTokenizer",
            f'model = AutoPeftModelForCausalLM.from_pretrained("{adapter}", dtype="{dtype}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{adapter}")',
            f"inputs = tokenizer({prompt!r}, return_tensors='pt')",
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=48)[0]))",
        )
    )


def _dtype(run: Run) -> str:
    return str(weights_dtype(load_config(run.config_file, run.overrides))).removeprefix("torch.")


def _show(what: str, lines: str) -> None:
    console.print(what, highlight=False)
    for line in lines.split("\n"):
        console.print(f"  {line}", style="bold", highlight=False, markup=False)
