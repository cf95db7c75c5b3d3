"""What each kind of quickstart hands to the part that they share: one fine-tuning run that is ready to start."""

import hashlib
import itertools
import json
import os
import platform
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.markup import escape

from ebft.config.section import changed_keys
from ebft.errors import ConfigError
from ebft.printed import safe_console
from ebft.run.config.schema import RunConfig
from ebft.tools.doctor.environment import PACKAGE, output_of
from ebft.tools.fetch import examples_folder

CONFIGS = (examples_folder() / "quickstart").resolve()  # a link to the examples, in a clone
_MADE = ("data", "base", "ebft", "sft", "sft-tenth", "samples.txt", "summary.json")


@dataclass(frozen=True)
class Run:
    """A config file with overrides, and the number of groups of held-out documents that it is measured on."""

    config_file: Path
    overrides: list[str]
    groups: int


def own_copy(config_file: Path, output: Path) -> Path:
    """A copy of a config of the package next to the results; one that was changed is renamed."""
    output.mkdir(parents=True, exist_ok=True)
    copy = output / config_file.name
    if copy.is_file() and copy.read_bytes() != config_file.read_bytes():
        names = (f"{copy.name}.changed{number or ''}" for number in itertools.count())
        copy.replace(next(path for path in map(copy.with_name, names) if not path.exists()))
    return Path(shutil.copy(config_file, output / config_file.name))


def moved(output: Path, default: Path, paths: dict[str, str]) -> list[str]:
    """Overrides for keys whose `paths` are in the output folder, for which a config of the package names `default`."""
    return [f"{key}={output / path}" for key, path in paths.items()] if output != default else []


def check_output(output: Path) -> None:
    """Raise ConfigError if `output` has files that a quickstart would replace, but did not write."""
    configs = [path.name for path in CONFIGS.glob("*.yaml")]
    if any((output / name).is_file() for name in (*configs, "data/made_from.json")):
        return  # of a quickstart
    found = [name for name in _MADE if (output / name).exists()]
    if found:
        raise ConfigError(f"--output {output} contains {', '.join(found)}. Choose another folder.")


def command_line(command: str, config_file: Path, overrides: list[str]) -> str:
    """The `ebft` command that does what this script does in its own process."""
    return shlex.join(["ebft", command, os.path.relpath(config_file), *overrides])


def show_command(config_file: Path, overrides: list[str]) -> None:
    """Print the command that is equivalent to a phase."""
    line = escape(command_line("train", config_file, overrides))
    console.print("[dim]the same as:[/]", line, style="bold", highlight=False)


console = safe_console(soft_wrap=True)


class Phases:
    """Headings with running numbers, and the seconds that each phase took."""

    def __init__(self, count: int):
        self.count = count
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, heading: str) -> Iterator[None]:
        """Print the heading, and keep the time that the block takes under `name`."""
        console.print(f"\n[bold cyan]{len(self.seconds) + 1}/{self.count}  {heading}")
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 1)
        console.print(f"[dim]{self.seconds[name]:.1f} s")


def make_once(folder: Path, made_from: Any, make: Callable[[], Any]) -> None:
    """Call `make`, which fills `folder`, unless an earlier run finished it from the same `made_from`, and say so."""
    stamp, mark = folder / "made_from.json", fingerprint(made_from)
    try:
        made = json.loads(stamp.read_text())
        is_whole = all((folder / name).stat().st_size == size for name, size in made["files"].items())
        is_made = is_whole and made["made_from"] == mark
    except (OSError, ValueError, TypeError):  # it was not made, or not to the end
        is_made = False
    if is_made:
        console.print(f"[green]Made by an earlier run, and used again: {escape(str(folder))}")
        return
    stamp.unlink(missing_ok=True)
    make()
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    stamp.write_text(json.dumps({"made_from": mark, "files": sizes}))  # last: what was interrupted is made again


def save_summary(path: Path, configs: dict[str, RunConfig], seconds: dict[str, float], **found: Any) -> None:
    """Write what the run found out, and what it depends on, as one JSON object."""
    machine = {"cpu_count": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
    machine |= {package: version(package) for package in ("torch", "transformers", "peft", "ebft")}
    machine["commit"] = output_of("git", "-C", str(PACKAGE), "rev-parse", "HEAD")
    of_runs = {name: dict(changed_keys(config)) for name, config in configs.items()}
    summary = {**found, "machine": machine, "config": of_runs, "seconds": seconds}
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def fingerprint(value: Any) -> str:
    """A short text that changes with any part of a JSON-like value."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
