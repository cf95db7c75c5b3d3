"""The command `ebft`. Heavy imports are deferred until a command needs them."""

import faulthandler
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from typing import Annotated, Any

import typer

from ebft.machine import watch_parent
from ebft.printed import BROKEN_PIPE, OutputError, open_streams, say
from ebft.tools import console
from ebft.tools.cli import prepare, results, training
from ebft.tools.cli.arguments import ConfigCommand
from ebft.tools.cli.models import ServingCommand, fetch, merge_lora, merge_sharded, quantize, vllm_serve

app = typer.Typer(
    help="Energy-based fine-tuning of language models.",
    no_args_is_help=True,
    add_completion=True,  # does not slow down commands: the shell asks only when the user presses Tab
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        say(f"ebft {version('ebft')}")
        raise typer.Exit()


_KEYS = "`ebft config` lists all keys of a config with their descriptions. Keys are also options: --learning-rate 1e-5."
_OVERRIDES: dict[str, Any] = {"cls": ConfigCommand}
_COMMANDS: tuple[tuple[Callable[..., None], str, dict[str, Any]], ...] = (
    (prepare.quickstart, "Fine-tune a small model and show the effect.", {}),
    (training.init, "Write a config for your data and model.", _OVERRIDES),
    (training.train, "Train a model.", {"cls": training.LaunchingCommand, "epilog": _KEYS}),
    (prepare.preprocess, "Prepare and show the rows of a config.", _OVERRIDES),
    (results.evaluate, "Evaluate models on held-out data.", _OVERRIDES),
    (results.inference, "Sample from a trained model.", _OVERRIDES),
    (merge_lora, "Merge an adapter into its base model.", _OVERRIDES),
    (merge_sharded, "Merge a checkpoint that was saved in parts.", {}),
    (quantize, "Quantise a trained model.", _OVERRIDES),
    (results.show, "Show the rollouts of a run.", {}),
    (results.report, "Write an HTML report of a run.", {}),
    (training.tui, "Follow a run in a terminal dashboard.", {}),
    (vllm_serve, "Serve a model with vLLM.", {"cls": ServingCommand}),
    (prepare.config, "List all config keys, or check a config file.", _OVERRIDES),
    (fetch, "Download a model, or copy the examples.", {}),
    (prepare.env, "Show versions and machine for a bug report.", _OVERRIDES),
    (prepare.doctor, "Check the installation, and a config before training.", _OVERRIDES),
)
for _command, _summary, _settings in _COMMANDS:
    app.command(_command.__name__.replace("_", "-"), short_help=_summary, **_settings)(_command)


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Energy-based fine-tuning of language models."""
    console.listing(console.set_log_level)()


def main() -> None:
    """Run the command line."""
    open_streams()
    with suppress(OSError, ValueError):  # not a file
        faulthandler.enable()  # a crash in C prints the lines of Python that led to it, also in forked processes
    watch_parent()
    if not sys.stderr.isatty():  # in a file or a pipe, each update would be a line; libraries read these on import
        for name in ("TQDM_DISABLE", "HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")
    console.show_warnings()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OutputError as error:
        if error.is_broken_pipe:  # as with `| head`
            sys.exit(BROKEN_PIPE)
        console.say_error(str(error))
        sys.exit(console.FAILED)
