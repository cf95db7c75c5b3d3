"""`ebft init [DATA]...`, which writes a config, and the config of `ebft train --model MODEL --data DATA`."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ebft.catalog import MODELS
from ebft.config.load import apply_overrides
from ebft.errors import ConfigError
from ebft.methods import named_methods
from ebft.printed import say
from ebft.tools.cli.arguments import argument, complete_model, complete_word, option
from ebft.tools.console import polite

if TYPE_CHECKING:
    from ebft.methods.method import Method

MODEL_HELP = "Base model: a folder, a Hub id, or a model of `ebft fetch`."
DATA_HELP = "Training data: a file, a folder or a Hub id."
CONFIG = "train.yaml"  # of a run without a config, in its output_dir
_OF_ONE_START = ("resume_from_checkpoint", "auto_resume_from_checkpoints")  # overrides that are not written
ModelOption = Annotated[str | None, option("MODEL", MODEL_HELP, complete=complete_model)]
METHOD_HELP = f"How to train: {', '.join(named_methods())}. Default: the first of these that fits the rows."
MethodOption = Annotated[Literal[tuple(named_methods())] | None, option("NAME", METHOD_HELP)]


@polite
def init(
    words: Annotated[
        list[str] | None,
        argument(
            "[DATA]... [KEY=VALUE]...",
            f"{DATA_HELP} Values that override the proposed ones are written as in `ebft train`.",
            complete=complete_word,
        ),
    ] = None,
    model: ModelOption = None,
    method: MethodOption = None,
    output: Annotated[Path, option("FILE", "The file to write. Default: run.yaml.")] = Path("run.yaml"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
) -> None:
    """Write a config for your data and model.

    The columns of the data determine which methods fit: texts, prompts with completions, chats, preference pairs,
    labelled completions or labelled steps. Lengths are measured on a sample of the rows, and batches are chosen for the
    memory of this machine. The config evaluates on held-out rows, saves checkpoints and keeps the best one. In a
    terminal, init asks for what is not given.

    Examples:

    ebft init my_rows.jsonl --model smollm2-135m

    ebft init texts/ --model Qwen/Qwen2.5-0.5B --method sft --output sft.yaml

    ebft init pairs.parquet --model my/model learning_rate=1e-5
    """
    # A path may contain `=` if it exists.
    overrides = [word for word in words or [] if "=" in word and not Path(word).exists()]
    data = [word for word in words or [] if word not in overrides]
    apply_overrides({"datasets": [{} for _ in data]}, overrides)  # raises
    asks = sys.stdin.isatty() and sys.stdout.isatty()
    if output.exists() and not overwrite:
        raise ConfigError(f"{output} exists. Choose another file with --output, or replace it with --overwrite.")
    if not data:
        data = [_asked(asks, "DATA", "Training data (a file, a folder or a Hub id)")]
    model = model or _asked(asks, "--model", f"Base model (a folder, a Hub id, or {', '.join(MODELS)})")
    command = ["ebft", "init", *data, "--model", model, *(["--method", method] if method else []), *overrides]
    say("Looking at the model and the data ...", err=True)
    from ebft.tools.init.config import draft  # imports torch, as the next one
    from ebft.tools.init.draft import render, write

    found = draft(data, model, method, overrides, _choose if asks else None)
    write(output, render(found, command))
    say("\n".join([*found.notes, f"Written to {output}. Next:"]))
    for name in ("doctor", "train"):
        say(f"  {shlex.join(['ebft', name, str(output)])}")


def config_of_data(
    model: str | None, data: Sequence[str], method: str | None, overrides: Sequence[str]
) -> tuple[Path, list[str]]:
    """The config of `ebft train` without a file, in its output_dir, and the overrides that are not in it. The config
    that the same command wrote before is used again. Raises ConfigError if another one is there."""
    for name, value in (("--model", model), ("--data", data)):
        if not value:
            raise ConfigError(f"{name} is missing: training without a config needs --model and --data.")
    kept = [each for each in overrides if not each.startswith(_OF_ONE_START)]
    options = [word for path in data for word in ("--data", path)]
    command = ["ebft", "train", "--model", str(model), *options, *(["--method", method] if method else []), *kept]
    say("Looking at the model and the data ...", err=True)
    from ebft.tools.init.config import draft  # imports torch, as the next one
    from ebft.tools.init.draft import render, write, written_by

    found = draft(data, str(model), method, kept)
    path = Path(found.values["output_dir"]).expanduser() / CONFIG
    if not path.exists():
        write(path, render(found, command))
        say("\n".join([*found.notes, f"Config written to {path}"]), err=True)
    elif written_by(command) not in path.read_text(encoding="utf-8").split("\n"):
        raise ConfigError(
            f"{path} is the config of a run with other options. Set another output_dir=FOLDER, or resume that run with "
            f"`ebft train {path} auto_resume_from_checkpoints=true`, with what it changes, such as max_steps, after it."
        )
    return path, [each for each in overrides if each not in kept]


def _asked(asks: bool, name: str, question: str) -> str:
    """The answer of the user. Raises ConfigError if this is no terminal."""
    if not asks:
        raise ConfigError(f"{name} is missing: ebft init asks for it in a terminal only. {question}: add it.")
    return typer.prompt(question).strip()


def _choose(fitting: dict[str, "Method"], default: str) -> str:
    """The method that the user selects among the methods that fit the rows."""
    say("Methods that fit these rows:")
    for name, method in fitting.items():
        say(f"  {name:24}{method.name}")
    return typer.prompt("Method", default=default).strip()
