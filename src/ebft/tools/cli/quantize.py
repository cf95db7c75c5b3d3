"""`ebft quantize CONFIG|FOLDER [key=value ...] --output DIR`."""

from pathlib import Path
from typing import Annotated

import typer

from ebft.errors import ConfigError
from ebft.printed import say
from ebft.tools.cli.arguments import ConfigOrFolder, FormerTo, Overrides, read_source, renamed
from ebft.tools.cli.console import polite



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
