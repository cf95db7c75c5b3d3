"""`ebft env [CONFIG] [key=value ...]`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ebft.config.load import load_config
from ebft.printed import say
from ebft.tools.cli.arguments import Overrides, complete_config
from ebft.tools.cli.console import listing



@listing
def env(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG]",
            help="The YAML config file; adds the interpreter of vLLM (vllm.python).",
            show_default=False,
            autocompletion=complete_config,
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the versions, the machine and the environment variables for a bug report.

    Values of tokens, keys and passwords are not shown.

    Examples:

    ebft env

    ebft env run.yaml

    ebft env --json
    """
    python = None if config is None else load_config(config, overrides or []).vllm.python
    from ebft.tools.doctor.environment import as_text, environment  # imports torch

    found = environment(python)
    say(json.dumps(found, indent=2) if as_json else as_text(found))
