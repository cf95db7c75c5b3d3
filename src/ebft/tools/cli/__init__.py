"""The command `ebft`. Heavy imports are deferred until a command needs them."""

import faulthandler
import sys
from contextlib import suppress
from importlib.metadata import version
from typing import Annotated

import typer

from ebft.config.user_code import name_exits
from ebft.printed import BROKEN_PIPE, OutputError, open_streams, say
from ebft.processes import watch_parent
from ebft.tools.cli import config as config_command
from ebft.tools.cli import doctor as doctor_command
from ebft.tools.cli import env as env_command
from ebft.tools.cli import evaluate as evaluate_command
from ebft.tools.cli import fetch as fetch_command
from ebft.tools.cli import inference as inference_command
from ebft.tools.cli import merge as merge_lora_command
from ebft.tools.cli import merge_sharded as merge_sharded_command
from ebft.tools.cli import preprocess as preprocess_command
from ebft.tools.cli import quantize as quantize_command
from ebft.tools.cli import quickstart as quickstart_command
from ebft.tools.cli import report as report_command
from ebft.tools.cli import show as show_command
from ebft.tools.cli import train as train_command
from ebft.tools.cli import tui as tui_command
from ebft.tools.cli import vllm_serve as vllm_serve_command
from ebft.tools.cli.console import (
    FAILED,
    name_remaining_threads,
    say_error,
    show_progress_bars_in_terminals_only,
    show_warnings,
)

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


quickstart_command.register(app)
train_command.register(app)
preprocess_command.register(app)
evaluate_command.register(app)
inference_command.register(app)
merge_lora_command.register(app)
merge_sharded_command.register(app)
quantize_command.register(app)
show_command.register(app)
report_command.register(app)
tui_command.register(app)
vllm_serve_command.register(app)
config_command.register(app)
fetch_command.register(app)
env_command.register(app)
doctor_command.register(app)


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Energy-based fine-tuning of language models."""


def main() -> None:
    """Run the command line."""
    open_streams()
    with suppress(OSError, ValueError):  # not a file
        faulthandler.enable()  # a crash in C prints the lines of Python that led to it, also in forked processes
    name_exits()
    watch_parent()
    show_progress_bars_in_terminals_only()
    show_warnings()
    code = 0
    try:
        _run()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise
    finally:
        name_remaining_threads(code)


def _run() -> None:
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OutputError as error:
        if error.is_broken_pipe:  # as with `| head`
            sys.exit(BROKEN_PIPE)
        say_error(str(error))
        sys.exit(FAILED)
