"""`ebft train CONFIG [key=value ...]`."""

from pathlib import Path
from typing import Annotated

import typer

from ebft.cli.arguments import ConfigFile, Overrides
from ebft.cli.console import is_main_process, polite
from ebft.cli.listing import key_overview
from ebft.cli.tui import train_with_dashboard
from ebft.config.load import load_config
from ebft.run.checks import check_runnable

HELP = """Train a model with the settings of a config.

Examples:

ebft train run.yaml

ebft train run.yaml ebft.stride=4 learning_rate=1e-5

ebft train run.yaml --tui

ebft train run.yaml resume_from_checkpoint=model-out/checkpoint-50
"""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    # Unknown options are parsed as overrides, whose error message shows the correct syntax.
    settings = {"ignore_unknown_options": True}
    app.command("train", help=HELP, short_help="Train a model.", epilog=key_overview(), context_settings=settings)(
        command
    )


@polite
def command(
    config: ConfigFile,
    overrides: Overrides = None,
    tui: Annotated[
        bool,
        typer.Option(
            "--tui",
            help="Show a terminal dashboard. Training runs in another process, with its output in train.log in "
            "output_dir; Ctrl-C stops it and saves a checkpoint of the last completed step, q closes the dashboard. "
            "Requires the package textual.",
        ),
    ] = False,
) -> None:
    """Load the config, train, and print the path of the model."""
    run_config = load_config(config, overrides or [])
    check_runnable(run_config)
    if tui:
        raise typer.Exit(train_with_dashboard([str(config), *(overrides or [])], Path(run_config.output_dir)))
    from ebft.run.training import train  # imports torch, which is slow and not needed for help and config errors

    try:
        result = train(run_config)
    except KeyboardInterrupt as stop:
        if str(stop):  # TrainingInterrupted, which says how to resume
            raise
        raise KeyboardInterrupt("Interrupted before training started; nothing was saved.") from None
    if is_main_process():
        typer.echo(result.outcome, err=True)
        typer.echo(f"Model saved in {result.output_dir}")
    leave_process_group()


def leave_process_group() -> None:
    """Close the process group of torchrun: leaving this to the exit of the interpreter may abort the process."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
