"""`ebft doctor [CONFIG] [key=value ...]` and `ebft env [CONFIG] [key=value ...]`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from ebft.config.load import load_config
from ebft.printed import safe_console, say
from ebft.secrets import without_secrets_in_text
from ebft.tools.cli.arguments import Overrides, complete_config
from ebft.tools.cli.console import listing
from ebft.tools.doctor.check import Attempt, Check

FOUND_ERRORS = 1
_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


@listing
def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG]",
            help="The YAML config file. Without it, check the installation.",
            show_default=False,
            autocompletion=complete_config,
        ),
    ] = None,
    overrides: Overrides = None,
    step: Annotated[bool, typer.Option(help="Load the model and run one training step.")] = True,
) -> None:
    """Check the installation, and whether a config can be trained on this machine.

    With a config, the checks include packages, model, data, server, output folder, disk space and memory, and one
    training step on the longest rows, which reports the peak memory of each phase. Nothing is saved. The exit code is 1
    if there is an error.

    Examples:

    ebft doctor

    ebft doctor run.yaml

    ebft doctor run.yaml micro_batch_size=4 --no-step
    """
    from ebft.tools.doctor.environment import check_installation

    report = _Report()
    report.add(check_installation())
    if config is not None:
        loaded = Attempt("config").run(load_config, config, overrides or [], ok=f"{config} is valid")
        report.add(loaded.checks)
        if not (loaded.failed or report.errors):
            from ebft.tools.doctor.run import check_config  # imports torch

            report.add(check_config(loaded.result, step=step))
    say(f"{report.errors} errors, {report.warnings} warnings")
    if report.errors:
        raise typer.Exit(FOUND_ERRORS)


class _Report:
    """Prints checks as they are made, and counts errors and warnings."""

    def __init__(self) -> None:
        self.errors = self.warnings = 0
        self._console = safe_console(soft_wrap=True)

    def add(self, checks) -> None:
        for check in checks:
            self.errors += check.level == "error"
            self.warnings += check.level == "warning"
            self._print(check)

    def _print(self, check: Check) -> None:
        level = Text(f"{check.level:<8}", style=_STYLES[check.level])
        self._console.print(Text.assemble(level, f"{check.name}: ", without_secrets_in_text(check.message)))


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
