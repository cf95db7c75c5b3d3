"""`ebft merge-lora CONFIG|FOLDER`, `ebft merge-sharded FOLDER` and `ebft quantize CONFIG|FOLDER`."""

from pathlib import Path
from typing import Annotated

import typer

from ebft.errors import ConfigError
from ebft.printed import say
from ebft.tools.cli.arguments import BaseModel, ConfigOrFolder, FormerTo, LoraModelDir, Overrides, read_source, renamed
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

    The weights are read, merged and written one at a time, so the memory needed is that of the adapter and about twice
    the largest weight. A merge that was interrupted continues with the next shard when the same command is run again.

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


@polite
def quantize(
    source: ConfigOrFolder,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="DIR", help="Folder of the quantised model.", show_default=False)
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            "--type",
            metavar="int8|int4",
            help="Type of the weights; int4 requires a CUDA device.",
            autocompletion=lambda incomplete: ["int8", "int4"],
        ),
    ] = "int8",
    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Text to measure the perplexity on. Default: the held-out data of the config.",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=2, help="Number of tokens of the text.")
    ] = 16384,
    former_to: FormerTo = None,
) -> None:
    """Quantise the weights of a trained model with torchao, and print the perplexity before and after.

    The linear layers are quantised, except the output layer. An adapter has to be merged first (ebft merge-lora).

    Examples:

    ebft quantize run.yaml --output outputs/int8

    ebft quantize outputs/run/merged --output outputs/int8 --text held-out.txt
    """
    output = renamed(output, former_to, "--output", "--to")
    if output is None:
        raise ConfigError("--output DIR is required: the folder of the quantised model.")
    config, folder = read_source(source, overrides)
    if config is None and text is None:
        raise ConfigError("A folder has no held-out data. Give a text to measure the perplexity on with --text FILE.")
    from ebft.tools.export.quantize import held_out_sequences, quantize_model, text_sequences  # imports torch
    from ebft.tools.export.sources import as_mib

    def sequences(tokenizer):
        if text is not None:
            return text_sequences(text, tokenizer, max_tokens)
        return held_out_sequences(config, tokenizer, max_tokens)

    result = quantize_model(folder, output, kind, sequences)
    say(f"Weights: {as_mib(result.size_before)} before, {as_mib(result.size_after)} after ({kind})")
    perplexities = f"{result.perplexity_before:.4f} before, {result.perplexity_after:.4f} after"
    say(f"Perplexity of {result.tokens:,} predicted tokens: {perplexities}")
    say(f"Quantised model saved in {result.folder}")
