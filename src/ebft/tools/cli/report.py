"""`ebft report FOLDER`."""

from pathlib import Path
from typing import Annotated

import typer

from ebft.errors import RunError
from ebft.printed import say
from ebft.run_files import check_run, read_object
from ebft.tools.cli.arguments import RunFolder
from ebft.tools.cli.console import polite
from ebft.tools.dashboard.report import write_report

HELP = """Write report.html into the output folder of a run: curves, samples, health messages, config and evaluation.

`ebft train` writes it at the end of a run. The page is a single file without external resources.

Examples:

ebft report outputs/run

ebft evaluate run.yaml --output outputs/run/evaluation.json && ebft report outputs/run
"""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("report", help=HELP, short_help="Write an HTML report of a run.")(command)


@polite
def command(
    folder: RunFolder,
    evaluation: Annotated[
        Path | None,
        typer.Option(
            "--evaluation",
            metavar="FILE.json",
            help="Include this result of `ebft evaluate --output`. Default: evaluation.json in the folder, if any.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write the report and print its path."""
    check_run(folder)
    if evaluation is not None and not evaluation.is_file():
        raise RunError(f"--evaluation: the file {evaluation} does not exist. Write it with `ebft evaluate --output`.")
    if evaluation is not None and "models" not in (read_object(evaluation) or {}):
        raise RunError(f"--evaluation: {evaluation} is not a result of `ebft evaluate --output`.")
    try:
        path = write_report(folder, evaluation)
    except OSError as error:
        raise RunError(f"The report cannot be written to {folder} ({error}).") from error
    say(path)
