"""`ebft evaluate CONFIG [key=value ...] --model PATH ...`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ebft.cli.arguments import ConfigFile, Overrides
from ebft.cli.console import polite
from ebft.config.load import load_config

HELP = """Measure models side by side on a config's held-out data.

All models are compared on the same documents, with the same noise, in the feature space of the config's base_model.

Examples:

ebft evaluate run.yaml --model outputs/run --model outputs/sft --output result.json

ebft evaluate run.yaml evaluation.samples=8 --metric my_module.passes_tests
"""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("evaluate", help=HELP, short_help="Measure models on held-out data.")(command)


@polite
def command(
    config: ConfigFile,
    overrides: Overrides = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="PATH",
            help="Folder or hub id of a model or an adapter; may be repeated. Left out: base_model, and what "
            "the run left in output_dir. Differences are from the first.",
            show_default=False,
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="MODULE.FUNCTION",
            help="A function (prompt, completions, row) -> float to measure too, as in evaluation.metrics.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE.json", help="Write everything here.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw curves and histograms.", show_default=False)
    ] = None,
) -> None:
    """Load the config, measure the models, print the table, and write what was asked for."""
    run_config = load_config(config, overrides or [])
    if metric:
        run_config.evaluation.metrics = [*run_config.evaluation.metrics, *metric]
    from ebft.evaluation.plots import check_plots, save_plots
    from ebft.evaluation.result import check_writable
    from ebft.evaluation.run import evaluate  # imports torch, which help and config errors need not wait for

    if plot is not None:
        check_plots(plot)
    for path in filter(None, (output, plot)):
        check_writable(path)
    save = None if output is None else lambda so_far: so_far.save(output)
    evaluation = evaluate(run_config, model, after_each=save)
    Console(soft_wrap=False).print(evaluation.table())
    if output is not None:
        typer.echo(f"Written to {output}")
    if plot is not None:
        save_plots(evaluation, plot)
        typer.echo(f"Plots in {plot}")
