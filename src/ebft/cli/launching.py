"""The options of `ebft train` that start several processes."""

import difflib
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ebft.config.load import load_config
from ebft.config.schema import RunConfig
from ebft.errors import ConfigError
from ebft.launch.plan import LaunchOptions, Plan, plan_launch
from ebft.launch.sweep import MOST_RUNS, read_sweep
from ebft.launch.sweep_runs import Sweep
from ebft.launch.worker import is_launched
from ebft.printed import safe_console, say
from ebft.run.checks import check_runnable

PANEL = "Several processes"
_PASSED_ON = "ebft.options_for_the_launcher"  # in the context of the command
_SLIP = 0.75  # similarity of an unknown option to a known one that is suggested


def _option(name: str, metavar: str | None, text: str) -> Any:
    return typer.Option(name, metavar=metavar, help=text, show_default=False, rich_help_panel=PANEL)


Launcher = Annotated[
    str | None,
    _option(
        "--launcher",
        "NAME",
        "accelerate, torchrun, or python for one process. Default: accelerate if several processes are started. "
        "Options after -- are passed on to it.",
    ),
]
NumProcesses = Annotated[
    int | None,
    _option(
        "--num-processes",
        "N",
        "Number of processes on all machines together. Default: one per visible GPU, one on CPU.",
    ),
]
NumMachines = Annotated[
    int | None, _option("--num-machines", "N", "Number of machines; the command runs on each of them. Default: 1.")
]
MachineRank = Annotated[
    int | None, _option("--machine-rank", "R", "Number of this machine, from 0; each machine has another one.")
]
MainProcessIp = Annotated[
    str | None, _option("--main-process-ip", "ADDRESS", "Address of machine 0, the same on all machines.")
]
MainProcessPort = Annotated[
    int | None,
    _option(
        "--main-process-port",
        "PORT",
        "Port of machine 0, the same on all machines. Default: 29500, or a free port on one machine.",
    ),
]
SweepFile = Annotated[
    Path | None,
    typer.Option(
        "--sweep",
        metavar="FILE",
        help="Train every combination of a YAML file one after another, each in its own folder in output_dir, and "
        "compare them on the held-out rows. The file maps keys to lists of values, or lists mappings, one per run. "
        "The same command again skips finished runs and resumes others.",
        show_default=False,
    ),
]
MaxRuns = Annotated[
    int,
    typer.Option(
        "--max-runs",
        metavar="N",
        min=1,
        help=f"Largest number of runs of --sweep. Default: {MOST_RUNS}.",
        show_default=False,
    ),
]
DryRun = Annotated[
    bool,
    _option("--dry-run", None, "Print the command that starts the processes, or the runs of a sweep, and exit."),
]


class LaunchingCommand(TyperCommand):
    """A command whose words after -- are not arguments, but options for the launcher."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            end = args.index("--")
            ctx.meta[_PASSED_ON] = tuple(args[end + 1 :])
            args = args[:end]
        return super().parse_args(ctx, args)


def options_of(context: typer.Context) -> LaunchOptions:
    """The launch options of a `LaunchingCommand` that is running, by the names of its parameters."""
    names = LaunchOptions.__dataclass_fields__.keys() - {"passed_on"}
    values = {name: context.params[name] for name in names}
    return LaunchOptions(**values, passed_on=context.meta.get(_PASSED_ON, ()))


def check_options(context: typer.Context, overrides: Sequence[str]) -> None:
    """Raise ConfigError if one of the overrides is a misspelled option; other words with dashes are left to them."""
    known = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
    for word in overrides:
        name = word.partition("=")[0].replace("_", "-")
        near = difflib.get_close_matches(name, known, n=1, cutoff=_SLIP) if name.startswith("--") else []
        if near:
            raise ConfigError(f"Unknown option {word.partition('=')[0]!r:.100}. Did you mean {near[0]}?")


def checked_plan(config: Path, overrides: Sequence[str], options: LaunchOptions) -> tuple[RunConfig, Plan]:
    """The config and how its run is started, both checked.

    Warnings about the config are left to the processes, if several are started.
    """
    with warnings.catch_warnings(record=True) as found:
        run_config = load_config(config, overrides)
        plan = plan_launch(options, run_config)
        _check_passed_on(plan)
        check_runnable(run_config, plan.processes if plan.launcher else None)
    for warning in found if plan.launcher is None else ():
        warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
    return run_config, plan


def _check_passed_on(plan: Plan) -> None:
    if plan.options.passed_on:
        from ebft.launch.passed_on import check_passed_on  # imports the launcher, which is slow

        check_passed_on(plan)


def announce(plan: Plan) -> None:
    """Print how the run is started, if there is a choice."""
    if plan.note:
        say(plan.note, err=True)


def show(plan: Plan, words: Sequence[str]) -> None:
    """Print the command that starts `ebft WORDS`."""
    from ebft.launch.command import command_line

    say(command_line(plan, words))


def start(plan: Plan, words: Sequence[str]) -> int:
    """Start the processes of `ebft WORDS`, wait for them, and return their exit status."""
    from ebft.launch.agent import launch

    announce(plan)
    return launch(plan, words)


def sweep(
    file: Path, config: Path, overrides: Sequence[str], options: LaunchOptions, *, most: int, dry_run: bool, tui: bool
) -> int:
    """Train all combinations of a sweep, print their results, and return the exit status."""
    _check_sweep(options, tui)
    runs = Sweep(config, overrides, read_sweep(file, most), options, lambda words: _checked(config, words, options))
    if dry_run:
        for run in runs.runs:
            say(f"# {run.name}{': finished' if runs.is_finished(run) else ''}")
            say(shlex.join([sys.executable, "-m", "ebft.cli", *runs.words(run)]))
        return 0
    status = runs.train_all(lambda line: say(line, err=True))
    safe_console(soft_wrap=False).print(runs.table())
    return status


def _checked(config: Path, overrides: Sequence[str], options: LaunchOptions) -> RunConfig:
    with warnings.catch_warnings(action="ignore"):  # each run gives its own
        return checked_plan(config, overrides, options)[0]


def _check_sweep(options: LaunchOptions, tui: bool) -> None:
    if tui:
        raise ConfigError(
            "--tui shows one run. Train without it, and follow a run of the sweep with `ebft tui FOLDER`."
        )
    if options.machines > 1:
        raise ConfigError("--sweep runs on one machine. Remove --num-machines, or start its runs one by one.")
    if is_launched():
        raise ConfigError("--sweep launches its runs itself. Start it without a launcher, with --num-processes.")
