"""Where the results are, and how to use them: the commands and lines that the quickstart prints at its end."""

import os
import shutil
import sys
from pathlib import Path

from ebft.config.load import load_config
from ebft.models.precision import weights_dtype
from ebft.quickstart.phases import console
from ebft.quickstart.run import Run, command_line

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
