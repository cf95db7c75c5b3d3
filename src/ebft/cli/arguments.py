"""Arguments shared by several commands, and the names of options.

Names of options, in all commands:

- CONFIG, FOLDER, CONFIG|FOLDER: what the command reads, as its first argument. Overrides (key=value) follow a config.
- `--output`: the file or folder in which the command writes its result. Further files are named after their contents
  (`--plot`, `--html`).
- `--model`: a model of any kind, a name, folder or Hub id; `--base-model`: the one that an adapter or a trained model
  started from; `--lora-model-dir`: folder of the adapter, as the config key of that name.
- `--count`, `-n`: number of items to show; `--json`: print JSON instead of text; `--seed`: random seed.
- An option that stands for a config key has the key's name with dashes: `--max-new-tokens`, `--top-p`.

An option that was renamed keeps its former name as a hidden option (`hidden=True`), which `renamed` merges with it.
"""

from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import typer

from ebft.cli.completion import complete_config, complete_folder, complete_model, complete_override
from ebft.config.load import load_config
from ebft.config.schema import RunConfig
from ebft.data.locate import lasting_name, locate
from ebft.errors import ConfigError
from ebft.fetch.catalog import MODELS

ConfigFile = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", help="The YAML config file.", show_default=False, autocompletion=complete_config),
]
RunFolder = Annotated[
    Path,
    typer.Argument(
        metavar="FOLDER",
        help="The output_dir of a run, running or ended.",
        show_default=False,
        autocompletion=complete_folder,
    ),
]
ConfigOrFolder = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG|FOLDER",
        help="The config of the run, or the folder of a model or an adapter.",
        show_default=False,
        autocompletion=complete_config,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Values that override the config file.",
        show_default=False,
        autocompletion=complete_override,
    ),
]
BaseModel = Annotated[
    str | None,
    typer.Option(
        "--base-model",
        metavar="MODEL",
        help="Base model, if it is not where the adapter or the model card says.",
        show_default=False,
        autocompletion=complete_model,
    ),
]
LoraModelDir = Annotated[
    str | None,
    typer.Option(
        "--lora-model-dir",
        metavar="DIR",
        help="With a config: folder of the adapter. Default: output_dir.",
        show_default=False,
        autocompletion=complete_folder,
    ),
]
FormerTo = Annotated[Path | None, typer.Option("--to", hidden=True)]
Value = TypeVar("Value", Path, int)


class Source(NamedTuple):
    """What CONFIG|FOLDER names: a config, or None, and the folder of the model or adapter."""

    config: RunConfig | None
    folder: Path


def read_source(source: Path, overrides: list[str] | None, lora_model_dir: str | None = None) -> Source:
    """Load the config `source`, whose folder is `lora_model_dir` or else `output_dir`, or find the folder `source`.

    A folder may also be the name of a fetched model. Raises ConfigError if it is neither, or for a folder with options
    that require a config, and ModelError for a model that is not fetched.
    """
    is_name = not source.exists() and str(source) in MODELS
    if source.is_dir() or is_name:
        if overrides or lora_model_dir:
            given = "--lora-model-dir requires" if lora_model_dir else "overrides require"
            raise ConfigError(f"{source} is a folder: {given} a config.")
        if is_name:
            locate(str(source), "model", "FOLDER")
        return Source(None, Path(lasting_name(str(source))) if is_name else source)
    if not source.exists() and source.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{source} is neither a config file nor a folder with a model or an adapter.")
    config = load_config(source, overrides or [])
    return Source(config, Path(lora_model_dir or config.output_dir).expanduser())


def renamed(value: Value | None, former: Value | None, name: str, former_name: str) -> Value | None:
    """The value of the option `name`, or of its former name. Raises ConfigError if both are given."""
    if value is not None and former is not None:
        raise ConfigError(f"{name} and {former_name} are the same option. Keep {name}.")
    return former if value is None else value
