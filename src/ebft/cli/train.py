"""`ebft train CONFIG [key=value ...]`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ebft.cli import launching
from ebft.cli.arguments import ConfigFile, Overrides
from ebft.cli.console import is_main_process, polite
from ebft.cli.listing import key_overview
from ebft.cli.tui import train_with_dashboard
from ebft.config.load import read_values
from ebft.config.schema import RunConfig
from ebft.dashboard.files import EVALUATION, REPORT, rollout_files
from ebft.data.keys import PLAIN_TEXT
from ebft.data.locate import base_name
from ebft.fetch.catalog import is_gguf
from ebft.launch.plan import RAY
from ebft.launch.sweep import MOST_RUNS
from ebft.launch.worker import join_launch, launch_command, typed_command
from ebft.printed import say

HELP = """Train a model with the settings of a config.

With several GPUs, one process per GPU is started.

Examples:

ebft train run.yaml

ebft train run.yaml ebft.stride=4 learning_rate=1e-5

ebft train run.yaml --tui

ebft train run.yaml resume_from_checkpoint=model-out/checkpoint-50

ebft train run.yaml --num-processes 2

ebft train run.yaml --sweep sweep.yaml
"""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    # Unknown options are parsed as overrides, whose error message shows the correct syntax.
    settings = {"ignore_unknown_options": True}
    app.command(
        "train",
        cls=launching.LaunchingCommand,
        help=HELP,
        short_help="Train a model.",
        epilog=key_overview(),
        context_settings=settings,
    )(command)


@polite
def command(
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
    sweep: launching.SweepFile = None,
    max_runs: launching.MaxRuns = MOST_RUNS,
    dry_run: launching.DryRun = False,
    launcher: launching.Launcher = None,
    num_processes: launching.NumProcesses = None,
    num_machines: launching.NumMachines = None,
    machine_rank: launching.MachineRank = None,
    main_process_ip: launching.MainProcessIp = None,
    main_process_port: launching.MainProcessPort = None,
) -> None:
    """Load the config, then train in this process or start the processes that do."""
    join_launch()
    words = [str(config), *(overrides or [])]
    launching.check_options(context, words[1:])
    options = launching.options_of(context)
    if sweep is not None:
        status = launching.sweep(sweep, config, words[1:], options, most=max_runs, dry_run=dry_run, tui=tui)
        raise typer.Exit(status)
    run_config, plan = launching.checked_plan(config, words[1:], options)
    if dry_run:
        launching.show(plan, ["train", *words])
    elif tui:
        raise typer.Exit(train_with_dashboard([*words, *options.words()], Path(run_config.output_dir)))
    elif plan.launcher == RAY:
        launching.announce(plan)
        train_in_ray(run_config, config, overrides or [])
    elif plan.launcher is not None:
        raise typer.Exit(launching.start(plan, ["train", *words]))
    else:
        launching.announce(plan)
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
    from ebft.launch.ray_driver import train_with_ray

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
