"""`ebft merge-sharded FOLDER [--output DIR]`."""

from pathlib import Path
from typing import Annotated

import typer

from ebft.printed import say
from ebft.tools.cli.console import polite



@polite
def merge_sharded(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The checkpoint folder.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="DIR",
            help="Folder of the merged model. Default: the folder `merged` in the checkpoint.",
            show_default=False,
        ),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(
            "--base-model",
            metavar="MODEL",
            help="The model that was trained, for a checkpoint of another program without config and tokenizer.",
            show_default=False,
        ),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Largest size of a file of weights, such as 5GB.")
    ] = "50GB",
) -> None:
    """Merge a checkpoint that FSDP2 has saved in parts into one model.

    For checkpoints of runs with fsdp_config.state_dict_type: SHARDED_STATE_DICT. The result has the same files as a
    checkpoint that was saved whole, and can be loaded with from_pretrained. The whole model must fit in memory.

    Examples:

    ebft merge-sharded outputs/run/checkpoint-100

    ebft merge-sharded outputs/run/checkpoint-100 --output models/run-100
    """
    from ebft.tools.export.sharded import merge_sharded
    from ebft.tools.export.sources import as_mib  # what follows imports torch

    merged = merge_sharded(folder, output, base_model, max_shard_size)
    kind = "adapter" if merged.is_adapter else "model"
    say("The index of the parts (.metadata) is a pickle file; only classes of an index were loaded.", err=True)
    say(f"{merged.weights} weights, {as_mib(merged.bytes)}")
    say(f"Merged {kind} saved in {merged.folder}")
