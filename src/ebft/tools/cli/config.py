"""`ebft config`: list all config keys; `ebft config --check FILE`: check a config file."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ebft.config.load import load_config
from ebft.config.reference import changed_keys
from ebft.config.schema import RunConfig
from ebft.errors import ConfigError
from ebft.printed import safe_console
from ebft.run.checks import check_runnable, imported_names
from ebft.secrets import REMOVED, value_without_secrets
from ebft.tools.cli.arguments import complete_config, complete_word, option_listing
from ebft.tools.cli.console import listing

CHECK_HELP = (
    "Check this YAML file: keys and values, contradictions, optimizer and schedule, trackers, output_dir, dataset "
    "transforms, and whether a block fits in sequence_len. Modules of your own functions (transforms, reward "
    "functions, tools, plugins) are imported, which runs their code. Models, datasets and devices are checked when "
    "training starts."
)


@listing
def config(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORD | KEY=VALUE...]",
            help="Show only keys that contain WORD. With --check: overrides, as in `ebft train`.",
            show_default=False,
            autocompletion=complete_word,
        ),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option("--check", metavar="FILE", help=CHECK_HELP, show_default=False, autocompletion=complete_config),
    ] = None,
    json_schema: Annotated[
        bool, typer.Option("--json-schema", help="Print the JSON schema of a config, for editors and other tools.")
    ] = False,
) -> None:
    """List all config keys with their descriptions, or check a config file.

    Examples:

    ebft config

    ebft config lora

    ebft config --check run.yaml learning_rate=1e-5

    ebft config --json-schema > ebft.schema.json
    """
    if json_schema:
        if check is not None or words:
            raise ConfigError("--json-schema takes no other arguments. Leave out --check and search words.")
        print(json.dumps(RunConfig.model_json_schema(), indent=2))
        return
    console = safe_console(soft_wrap=check is not None)
    if check is None:
        unknown = next((word for word in words or [] if word.startswith("-")), None)
        if unknown is not None:
            raise ConfigError(f"No such option: {unknown}. See `ebft config --help`.")
        search = " ".join(words or [])
        found = list(option_listing(search))
        if not found:
            raise ConfigError(f"No key contains {search!r}. Run `ebft config` to list all keys.")
        for part in found:
            console.print(part)
        return
    config = load_config(check, words or [])
    check_runnable(config)
    hides = False
    for key, value in changed_keys(config):
        shown = repr(value_without_secrets(key, value))
        is_hidden = shown.count(REMOVED) > repr(value).count(REMOVED)
        hides |= is_hidden
        console.print(f"{key}: {shown if is_hidden else repr(value)}", markup=False)
    if hides:
        console.print(f"Passwords, tokens and keys are shown as {REMOVED}; the run uses their values.", markup=False)
    own = imported_names(config)
    if own:
        console.print(f"Imported to check them, which ran their modules' code: {', '.join(own)}", markup=False)
    rest = "options not shown have their default values. Data and models were not checked"
    console.print(f"{check} is valid for {config.method.name}; {rest}.", markup=False)
