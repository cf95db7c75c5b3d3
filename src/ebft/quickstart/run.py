"""What each kind of quickstart hands to the part that they share: one fine-tuning run that is ready to start."""

import os
import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from ebft.config.schema import RunConfig
from ebft.errors import ConfigError
from ebft.quickstart.phases import console

CONFIGS = (Path(__file__).parents[1] / "examples" / "quickstart").resolve()  # a link to the examples, in a clone
_MADE = ("data", "init", "base", "ebft", "samples.txt", "summary.json", "curves.png")


@dataclass(frozen=True)
class Run:
    """A config file with overrides, and how it is measured.

    `groups` is the number of groups of held-out documents, `earlier` the configs of runs that made the base model.
    """

    config_file: Path
    overrides: list[str]
    groups: int
    earlier: dict[str, RunConfig] = field(default_factory=dict)


def own_copy(config_file: Path, output: Path) -> Path:
    """A copy of a config of the package next to the results, for commands that the user repeats and changes.

    A copy that was changed is renamed.
    """
    output.mkdir(parents=True, exist_ok=True)
    copy = output / config_file.name
    if copy.is_file() and copy.read_bytes() != config_file.read_bytes():
        copy.replace(copy.with_name(f"{copy.name}.changed"))
    return Path(shutil.copy(config_file, output / config_file.name))


def check_output(output: Path) -> None:
    """Raise ConfigError if `output` has files with the names of those that a quickstart writes, but of others."""
    configs = [path.name for path in CONFIGS.glob("*.yaml")]
    if any((output / name).is_file() for name in (*configs, "data/made_from.json")):
        return  # of a quickstart
    found = [name for name in _MADE if (output / name).exists()]
    if found:
        raise ConfigError(
            f"--output {output} contains {', '.join(found)}, which would be replaced. Choose another folder."
        )


def command_line(command: str, config_file: Path, overrides: list[str]) -> str:
    """The `ebft` command that does what this script does in its own process."""
    return shlex.join(["ebft", command, os.path.relpath(config_file), *overrides])


def show_command(config_file: Path, overrides: list[str]) -> None:
    """Print the command that is equivalent to a phase."""
    console.print("[dim]the same as:[/]", command_line("train", config_file, overrides), style="bold", highlight=False)
