"""`ebft config`: every key a config can have; `ebft config --check FILE`: is this file right?"""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ebft.cli.console import polite
from ebft.cli.listing import option_listing
from ebft.config.load import load_config
from ebft.config.reference import changed_keys
from ebft.config.schema import RunConfig
from ebft.errors import ConfigError
from ebft.run.checks import check_runnable

HELP = "Print every key of a config with its meaning, or check a config."
CHECK_HELP = (
    "Check this YAML file: every key and value, contradictions, the optimizer and schedule, trackers, output_dir, the "
    "dataset transforms, and room for a block. Models, datasets and devices are looked at when training starts."
)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("config", help=HELP)(command)


@polite
def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORD | KEY=VALUE...]",
            help="Show only the keys that contain WORD; with --check, overrides as for `ebft train`.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option("--check", metavar="FILE", help=CHECK_HELP, show_default=False),
    ] = None,
    json_schema: Annotated[
        bool, typer.Option("--json-schema", help="Print the JSON schema of a config, for editors and other tools.")
    ] = False,
) -> None:
    """Print the keys, their JSON schema, or what a checked file changes."""
    if json_schema:
        if check is not None or words:
            raise ConfigError("--json-schema prints the schema of every config. Leave out --check and other words.")
        print(json.dumps(RunConfig.model_json_schema(), indent=2))
        return
    console = Console(soft_wrap=check is not None)
    if check is None:
        search = " ".join(words or [])
        found = list(option_listing(search))
        if not found:
            raise ConfigError(f"No key contains {search!r}. `ebft config` prints every key.")
        for part in found:
            console.print(part)
        return
    config = load_config(check, words or [])
    check_runnable(config)
    for key, value in changed_keys(config):
        console.print(f"{key}: {value!r}", markup=False)
    rest = "every option not shown has its default. Data and models were not looked at"
    console.print(f"{check} is valid; {rest}.", markup=False)
