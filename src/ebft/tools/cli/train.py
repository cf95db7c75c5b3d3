"""`ebft train CONFIG [key=value ...]`."""

import difflib
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ebft.catalog import is_gguf
from ebft.config.load import load_config, read_values
from ebft.config.schema import RunConfig
from ebft.data.locate import base_name
from ebft.data.transforms import PLAIN_TEXT
from ebft.errors import ConfigError
from ebft.monitor.run_files import EVALUATION, REPORT, rollout_files
from ebft.printed import safe_console, say
from ebft.processes import is_launched, join_launch, launch_command, typed_command
from ebft.run.checks import check_runnable
from ebft.tools.cli.arguments import ConfigFile, Overrides
from ebft.tools.cli.console import is_main_process, polite
from ebft.tools.cli.tui import train_with_dashboard
from ebft.tools.launch.plan import RAY, LaunchOptions, Plan, plan_launch
from ebft.tools.launch.sweep import MOST_RUNS, Sweep, read_sweep

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
        from ebft.tools.launch.agent import check_passed_on  # imports the launcher, which is slow

        check_passed_on(plan)


def announce(plan: Plan) -> None:
    """Print how the run is started, if there is a choice."""
    if plan.note:
        say(plan.note, err=True)


def show(plan: Plan, words: Sequence[str]) -> None:
    """Print the command that starts `ebft WORDS`."""
    from ebft.tools.launch.agent import command_line

    say(command_line(plan, words))


def start(plan: Plan, words: Sequence[str]) -> int:
    """Start the processes of `ebft WORDS`, wait for them, and return their exit status."""
    from ebft.tools.launch.agent import launch

    announce(plan)
    return launch(plan, words)


def train_sweep(
    file: Path, config: Path, overrides: Sequence[str], options: LaunchOptions, *, most: int, dry_run: bool, tui: bool
) -> int:
    """Train all combinations of a sweep, print their results, and return the exit status."""
    _check_sweep(options, tui)
    runs = Sweep(config, overrides, read_sweep(file, most), options, lambda words: _checked(config, words, options))
    if dry_run:
        for run in runs.runs:
            say(f"# {run.name}{': finished' if runs.is_finished(run) else ''}")
            say(shlex.join([sys.executable, "-m", "ebft", *runs.words(run)]))
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


@polite
def train(
    context: typer.Context,
    config: ConfigFile,
    overrides: Overrides = None,
    tui: Annotated[
        bool,
        typer.Option(
            "--tui",
            help="Show a terminal dashboard. Training runs in another process, with its output in train.log in "
            "output_dir; Ctrl-C stops it and saves a checkpoint of the last completed step, q closes the dashboard. "
            "Requires the package textual.",
        ),
    ] = False,
    sweep: SweepFile = None,
    max_runs: MaxRuns = MOST_RUNS,
    dry_run: DryRun = False,
    launcher: Launcher = None,
    num_processes: NumProcesses = None,
    num_machines: NumMachines = None,
    machine_rank: MachineRank = None,
    main_process_ip: MainProcessIp = None,
    main_process_port: MainProcessPort = None,
) -> None:
    """Train a model with the settings of a config.

    With several GPUs, one process per GPU is started.

    Examples:

    ebft train run.yaml

    ebft train run.yaml ebft.stride=4 learning_rate=1e-5

    ebft train run.yaml --tui

    ebft train run.yaml resume_from_checkpoint=model-out/checkpoint-50

    ebft train run.yaml --num-processes 2

    ebft train run.yaml --sweep sweep.yaml
    """
    join_launch()
    words = [str(config), *(overrides or [])]
    check_options(context, words[1:])
    options = options_of(context)
    if sweep is not None:
        status = train_sweep(sweep, config, words[1:], options, most=max_runs, dry_run=dry_run, tui=tui)
        raise typer.Exit(status)
    run_config, plan = checked_plan(config, words[1:], options)
    if dry_run:
        show(plan, ["train", *words])
    elif tui:
        raise typer.Exit(train_with_dashboard([*words, *options.words()], Path(run_config.output_dir)))
    elif plan.launcher == RAY:
        announce(plan)
        train_in_ray(run_config, config, overrides or [])
    elif plan.launcher is not None:
        raise typer.Exit(start(plan, ["train", *words]))
    else:
        announce(plan)
        train_here(run_config, config, overrides or [])


def train_here(run_config: RunConfig, config: Path, overrides: list[str]) -> None:
    """Train in this process with the settings of the file `config` and `overrides`, and print what to do next."""
    from ebft.run.training import train  # imports torch, which is slow and not needed for help and config errors

    command = launch_command(["ebft", "train", str(config), *overrides])
    try:
        result = train(run_config, command)
    except KeyboardInterrupt as stop:
        if str(stop):  # TrainingInterrupted, which says how to resume
            raise
        raise KeyboardInterrupt("Interrupted before training started; nothing was saved.") from None
    if is_main_process():
        folder = Path(result.output_dir)
        command = evaluate_command(config, overrides, folder) if run_config.method.can_be_compared else None
        say_result(result.describe_outcome(command), run_config, folder)
    leave_process_group()


def train_in_ray(run_config: RunConfig, config: Path, overrides: list[str]) -> None:
    """Train in Ray workers with the settings of the file `config` and `overrides`, and print what to do next."""
    from ebft.tools.launch.ray_driver import train_with_ray

    folder = Path(run_config.output_dir)
    command = typed_command(["ebft", "train", str(config), *overrides])
    values = read_values(config, overrides)
    evaluate = evaluate_command(config, overrides, folder) if run_config.method.can_be_compared else None
    outcome, _ = train_with_ray(run_config, values, command, evaluate)
    if outcome.status:
        say(outcome.message, err=True)
        raise typer.Exit(outcome.status)
    say_result(outcome.learned, run_config, folder)


def say_result(learned: str, config: RunConfig, folder: Path) -> None:
    """Print what a complete run learned, where its model is, and what to do next."""
    say(learned, err=True)
    say(f"Model saved in {folder}")
    for line in what_next(config, folder):
        say(line, err=True)


def evaluate_command(config: Path, overrides: list[str], folder: Path) -> str:
    """The command that compares the trained model with the base model, for the report of the run in `folder`."""
    kept = [override for override in overrides if not override.startswith("resume_from_checkpoint=")]
    return shlex.join(["ebft", "evaluate", str(config), *kept, "--output", str(folder / EVALUATION)])


def what_next(config: RunConfig, folder: Path) -> list[str]:
    """Where the report of the run in `folder` is, and the commands that show, sample from and merge its results."""
    commands = [["show", str(folder)]] if rollout_files(folder) else []
    if config.method.generates_text:
        asking = ["inference", str(folder), *(["--completion"] if _is_plain_text(config) else [])]
        commands += [asking, *(_merging(config, folder) if config.adapter is not None else [])]
    report = folder / REPORT
    following = "; ".join(shlex.join(["ebft", *command]) for command in commands)
    return [*([f"Report: {report}"] if report.is_file() else []), *([f"Next: {following}"] if following else [])]


def _is_plain_text(config: RunConfig) -> bool:
    """Whether all rows are text without a chat format, which the model has not learned to answer in then."""
    return all(str(entry.type).partition(".")[0] in PLAIN_TEXT for entry in config.datasets or [])


def _merging(config: RunConfig, folder: Path) -> list[list[str]]:
    """The commands that merge the adapter in `folder`; the weights of a GGUF file are converted first."""
    base = base_name(config.base_model, config.gguf_file)
    if not is_gguf(base):
        return [["merge-lora", str(folder)]]
    converted = base[: -len(".gguf")]
    return [["fetch", base, "--output", converted], ["merge-lora", str(folder), "--base-model", converted]]


def leave_process_group() -> None:
    """Close the process group of the launch: leaving this to the exit of the interpreter may abort the process."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
