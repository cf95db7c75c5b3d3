"""`ebft merge-lora CONFIG|FOLDER [key=value ...] [--to DIR]`."""

from pathlib import Path
from typing import Annotated

import typer

from ebft.cli.arguments import Overrides
from ebft.cli.console import polite
from ebft.config.load import load_config
from ebft.errors import ConfigError

HELP = """Merge a LoRA adapter into the weights of its base model.

The weights are merged and written one shard at a time, so the memory needed is that of the adapter and the largest
shard. A merge that was interrupted continues when the same command is run again.

Examples:

ebft merge-lora run.yaml

ebft merge-lora outputs/run --to merged --max-shard-size 2GB
"""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("merge-lora", help=HELP, short_help="Merge an adapter into its base model.")(command)


@polite
def command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG|FOLDER", help="The config of the run, or the folder of an adapter.", show_default=False
        ),
    ],
    overrides: Overrides = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="DIR",
            help="Folder of the merged model. Default: the folder `merged` in that of the adapter.",
            show_default=False,
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            "--max-shard-size",
            metavar="SIZE",
            help="Largest size of a file of weights, such as 5GB or 500MB. Default: the files of the base model.",
            show_default=False,
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base-model",
            metavar="MODEL",
            help="Base model, if it is not where the adapter or the config says.",
            show_default=False,
        ),
    ] = None,
    lora_model_dir: Annotated[
        str | None,
        typer.Option(
            "--lora-model-dir",
            metavar="DIR",
            help="With a config: folder of the adapter. Default: output_dir.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Find adapter and base model, merge, and print the folder and the peak memory."""
    is_folder = source.is_dir()
    if is_folder and (overrides or lora_model_dir):
        raise ConfigError(f"{source} is a folder: overrides and --lora-model-dir require a config.")
    config = None if is_folder else load_config(source, overrides or [])
    from rich.console import Console
    from rich.progress import Progress

    from ebft.export.memory import as_mib, peak_bytes  # what follows imports torch
    from ebft.export.merge import merge_adapter
    from ebft.export.sources import adapter_in_folder, adapter_of_run

    found = adapter_in_folder(source, base) if config is None else adapter_of_run(config, lora_model_dir, base)
    before = peak_bytes()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Merging shards", total=None)
        result = merge_adapter(
            found,
            to or found.adapter / "merged",
            max_shard_size,
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    peak = peak_bytes()
    again = f" ({result.resumed} of them from the interrupted merge)" if result.resumed else ""
    typer.echo(
        f"{result.shards} shards{again}, {as_mib(result.total_size)}, the largest {as_mib(result.largest_shard)}"
    )
    typer.echo(f"Peak memory: {as_mib(peak)}, {as_mib(peak - before)} more than before the merge")
    if result.untied:
        typer.echo("Input and output embeddings were tied in the base model; the merged model has them separately.")
    typer.echo(f"Merged model saved in {result.folder}")
