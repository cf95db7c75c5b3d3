"""`ebft train CONFIG [key=value ...]`."""

import typer

from ebft.cli.arguments import ConfigFile, Overrides
from ebft.cli.console import is_main_process, polite
from ebft.cli.listing import key_overview
from ebft.config.load import load_config
from ebft.run.checks import check_runnable

HELP = """Train a model as a config says.

Examples:

ebft train run.yaml

ebft train run.yaml ebft.stride=4 learning_rate=1e-5

ebft train run.yaml resume_from_checkpoint=model-out/checkpoint-50
"""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    # Unknown options reach the overrides, which say how they are written.
    settings = {"ignore_unknown_options": True}
    app.command("train", help=HELP, short_help="Train a model.", epilog=key_overview(), context_settings=settings)(
        command
    )


@polite
def command(
    config: ConfigFile,
    overrides: Overrides = None,
) -> None:
    """Load the config, train, and say where the model is."""
    run_config = load_config(config, overrides or [])
    check_runnable(run_config)
    from ebft.run.training import train  # imports torch, which help and config errors need not wait for

    result = train(run_config)
    if is_main_process():
        typer.echo(f"Model saved in {result.output_dir}")
    leave_process_group()


def leave_process_group() -> None:
    """End the communication with other processes of a torchrun; left to the interpreter's exit, it may abort there."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
