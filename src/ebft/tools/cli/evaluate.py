"""`ebft evaluate CONFIG [key=value ...] --model PATH ...`."""

from pathlib import Path
from typing import Annotated

import typer

from ebft.config.load import load_config
from ebft.errors import ConfigError
from ebft.printed import safe_console, say
from ebft.run_files import read_object
from ebft.tools.cli.arguments import ConfigFile, Overrides, complete_model
from ebft.tools.cli.console import polite


@polite
def evaluate(
    config: ConfigFile,
    overrides: Overrides = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="PATH",
            help="Folder or Hub id of a model or an adapter; can be repeated. Default: base_model, and the trained "
            "model in output_dir if there is one. Differences are relative to the first model.",
            show_default=False,
            autocompletion=complete_model,
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="MODULE.FUNCTION",
            help="Additional metric: a function (prompt, completions, row) -> float, as in evaluation.metrics.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE.json", help="Write all results to this file.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", help="Plot curves and histograms to this file.", show_default=False),
    ] = None,
) -> None:
    """Evaluate and compare models on the held-out data of a config.

    All models are evaluated on the same documents, with the same random numbers, in the feature space of the config's
    base_model.

    Examples:

    ebft evaluate run.yaml --model outputs/run --model outputs/sft --output result.json

    ebft evaluate run.yaml evaluation.samples=8 --metric my_module.passes_tests
    """
    run_config = load_config(config, overrides or [])
    if metric:
        run_config.evaluation.metrics = [*run_config.evaluation.metrics, *metric]
    from ebft.tools.evaluation.result import check_plots, check_writable, save_plots
    from ebft.tools.evaluation.run import (
        evaluate,  # imports torch, which is slow and not needed for help and config errors
    )

    if plot is not None:
        check_plots(plot)
    for path in filter(None, (output, plot)):
        check_writable(path)
    if (
        output is not None
        and output.is_file()
        and output.stat().st_size
        and "models" not in (read_object(output) or {})
    ):
        raise ConfigError(
            f"--output {output}: the file exists and is not the result of an evaluation. Choose another file."
        )
    save = None if output is None else lambda so_far: so_far.save(output)
    evaluation = evaluate(run_config, model, after_each=save)
    for table in filter(None, (evaluation.table(), evaluation.differences_table())):
        safe_console(soft_wrap=False).print(table)
    if output is not None:
        say(f"Results written to {output}")
    if plot is not None:
        save_plots(evaluation, plot)
        say(f"Plots written to {plot}")
