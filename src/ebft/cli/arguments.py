"""Arguments shared by several commands."""

from pathlib import Path
from typing import Annotated

import typer

from ebft.config.reference import option_groups

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML config file.", show_default=False)]


def complete_key(incomplete: str) -> list[str]:
    """Return the config keys that begin with `incomplete`, for completion in the shell."""
    keys = [option.key for options in option_groups().values() for option in options]
    return [f"{key}=" for key in keys if key.startswith(incomplete) and ".N." not in key]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Values that override the config file.",
        show_default=False,
        autocompletion=complete_key,
    ),
]
