"""`ebft merge-lora CONFIG|FOLDER [key=value ...] [--output DIR]`."""

from pathlib import Path
from typing import Annotated

import typer

from ebft.printed import say
from ebft.tools.cli.arguments import (
    BaseModel,
    ConfigOrFolder,
    FormerTo,
    LoraModelDir,
    Overrides,
    read_source,
    renamed,
)
from ebft.tools.cli.console import polite



@polite
def merge_lora(
    source: ConfigOrFolder,
    overrides: Overrides = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
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
    base_model: BaseModel = None,
    lora_model_dir: LoraModelDir = None,
    former_to: FormerTo = None,
) -> None:
    """Merge a LoRA adapter into the weights of its base model.

    The weights are read, merged and written one at a time, so the memory needed is that of the adapter and about twice the
    largest weight. A merge that was interrupted continues with the next shard when the same command is run again.

    Examples:

    ebft merge-lora run.yaml

    ebft merge-lora outputs/run --output merged --max-shard-size 2GB
    """
    output = renamed(output, former_to, "--output", "--to")
    config, folder = read_source(source, overrides, lora_model_dir)
    from rich.console import Console
    from rich.progress import Progress

    from ebft.tools.export.merge import merge_adapter
    from ebft.tools.export.sources import (  # what follows imports torch
        adapter_in_folder,
        adapter_of_run,
        as_mib,
        peak_bytes,
    )

    if config is None:
        found = adapter_in_folder(folder, base_model)
    else:
        found = adapter_of_run(config, lora_model_dir, base_model)
    before = peak_bytes()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Merging shards", total=None)
        result = merge_adapter(
            found,
            output or found.adapter / "merged",
            max_shard_size,
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    peak = peak_bytes()
    again = f" ({result.resumed} of them from the interrupted merge)" if result.resumed else ""
    shards = "1 shard" if result.shards == 1 else f"{result.shards} shards"
    say(f"{shards}{again}, {as_mib(result.total_size)}, the largest {as_mib(result.largest_shard)}")
    say(f"Peak memory: {as_mib(peak)}, {as_mib(peak - before)} more than before the merge")
    if result.untied:
        say("Input and output embeddings were tied in the base model; the merged model has them separately.")
    say(f"Merged model saved in {result.folder}")
