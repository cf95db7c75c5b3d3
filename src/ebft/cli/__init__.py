"""The command `ebft`: parse, call, print. Heavy imports wait until a command needs them."""

import typer

from ebft.cli import config as config_command
from ebft.cli import train as train_command
from ebft.cli.console import show_warnings

app = typer.Typer(
    help="Energy-based fine-tuning of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
train_command.register(app)
config_command.register(app)


def main() -> None:
    """Run the command line."""
    show_warnings()
    app()
