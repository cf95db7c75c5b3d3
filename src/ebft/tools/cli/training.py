"""`ebft init [DATA]...`, which writes a config; `ebft train`, its sweeps, and its dashboard, also of `ebft tui`."""

import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated, Any, Literal

import typer

from ebft.catalog import MODELS, base_name, is_gguf
from ebft.errors import ConfigError, RunError, warn
from ebft.machine import is_launched, is_main_process, join_launch, launch_command, typed_command
from ebft.methods import named_methods
from ebft.printed import print_table, say, traced
from ebft.run.checks import check_runnable
from ebft.run.config.schema import RunConfig, apply_overrides, load_config, read_values
from ebft.run_files import EVALUATION, REPORT, check_run, rollout_files
from ebft.tools.cli import arguments as shared
from ebft.tools.cli.arguments import argument, option
from ebft.tools.console import polite, say_loading
from ebft.tools.launch.plan import RAY, LaunchOptions, Plan, plan_launch
from ebft.tools.launch.sweep import MOST_RUNS, RESULTS, Sweep, read_sweep

MODEL_HELP = "Base model: a folder, a Hub id, or a model of `ebft fetch`."
DATA_HELP = "Training data: a file, a folder or a Hub id."
CONFIG = "train.yaml"  # of a run without a config, in its output_dir
_OF_ONE_START = ("resume_from_checkpoint", "auto_resume_from_checkpoints")  # overrides that are not written
ModelOption = Annotated[str | None, option("MODEL", MODEL_HELP, complete=shared.complete_model)]
METHOD_HELP = f"How to train: {', '.join(named_methods())}. Default: the first of these that fits the rows."
MethodOption = Annotated[Literal[tuple(named_methods())] | None, option("NAME", METHOD_HELP)]
PANEL = "Several processes"
_PASSED_ON = "ebft.options_for_the_launcher"  # in the context of the command
_launch_option = partial(option, rich_help_panel=PANEL)


@polite
def init(
    words: Annotated[
        list[str] | None,
        argument(
            "[DATA]... [KEY=VALUE]...",
            f"{DATA_HELP} Values that override the proposed ones are written as in `ebft train`.",
            complete=shared.complete_word,
        ),
    ] = None,
    model: ModelOption = None,
    method: MethodOption = None,
    output: Annotated[Path, option("FILE", "The file to write. Default: run.yaml.")] = Path("run.yaml"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
) -> None:
    """Write a config for your data and model.

    The columns of the data determine which methods fit: texts, prompts with completions, chats, preference pairs,
    labelled completions or labelled steps. Lengths are measured on a sample of the rows, and batches are chosen for the
    memory of this machine. The config evaluates on held-out rows, saves checkpoints and keeps the best one. In a
    terminal, init asks for what is not given.

    \b
    Examples:
      ebft init my_rows.jsonl --model smollm2-135m
      ebft init texts/ --model Qwen/Qwen2.5-0.5B --method sft --output sft.yaml
      ebft init pairs.parquet --model my/model learning_rate=1e-5
    """
    # A path may contain `=` if it exists.
    overrides = [word for word in words or [] if "=" in word and not Path(word).exists()]
    data = [word for word in words or [] if word not in overrides]
    apply_overrides({"datasets": [{} for _ in data]}, overrides)  # raises
    if output.exists() and not overwrite:
        raise ConfigError(f"{output} exists. Choose another file with --output, or replace it with --overwrite.")
    if not data:
        data = [_asked("DATA", "Training data (a file, a folder or a Hub id)")]
    model = model or _asked("--model", f"Base model (a folder, a Hub id, or {', '.join(MODELS)})")
    command = ["ebft", "init", *data, "--model", model, *(["--method", method] if method else []), *overrides]
    say("Looking at the model and the data ...", err=True)
    from ebft.tools.init.config import draft  # imports torch, as the next one
    from ebft.tools.init.draft import render, write

    def choose(fitting: dict[str, Any], default: str) -> str:
        say("Methods that fit these rows:")
        for name, method in fitting.items():
            say(f"  {name:24}{method.name}")
        return typer.prompt("Method", default=default).strip()

    found = draft(data, model, method, overrides, choose if is_terminal() else None)
    write(output, render(found, command))
    said = lambda *words: f"  {shlex.join(['ebft', *words])}"
    lines = [*found.notes, f"Written to {output}. Next:", said("doctor", str(output)), said("train", str(output))]
    if found.values.get("rl") == "ebft":
        folder = found.values["output_dir"].rstrip("/")
        lines += ["To compare it with SFT on the same rows:"]
        lines += [said("train", str(output), "rl=", f"output_dir={folder}-as-sft")]
        lines += [said("evaluate", str(output), "--model", f"{folder}-as-sft", "--model", folder)]
    say("\n".join(lines))


def config_of_data(
    model: str | None, data: Sequence[str], method: str | None, overrides: Sequence[str], dry_run: bool = False
) -> tuple[Path, list[str]]:
    """The config of `ebft train` without a file, in its output_dir (new, of a dry run: in a temporary folder), and the
    overrides that are not in it. What the same command wrote is used again. Raises ConfigError for another config."""
    if not (model and data):
        raise ConfigError("Training without a config needs both --model and --data.")
    kept = [each for each in overrides if not each.startswith(_OF_ONE_START)]
    options = [word for path in data for word in ("--data", path)]
    command = ["ebft", "train", "--model", str(model), *options, *(["--method", method] if method else []), *kept]
    say("Looking at the model and the data ...", err=True)
    from ebft.tools.init.config import draft  # imports torch, as the next one
    from ebft.tools.init.draft import render, write, written_by

    found = draft(data, str(model), method, kept)
    path = Path(found.values["output_dir"]).expanduser() / CONFIG
    if not path.exists():
        path = Path(mkdtemp(prefix="ebft-")) / CONFIG if dry_run else path
        write(path, render(found, command))
        say("\n".join([*found.notes, f"Config written to {path}"]), err=True)
    elif written_by(command) not in path.read_text(encoding="utf-8").split("\n"):
        raise ConfigError(
            f"{path} is the config of a run with other options. Set another output_dir=FOLDER, or resume that run with "
            f"`ebft train {path} auto_resume_from_checkpoints=true`, with what it changes, such as max_steps, after it."
        )
    return path, [each for each in overrides if each not in kept]


def _asked(name: str, question: str) -> str:
    """The answer of the user. Raises ConfigError if this is no terminal."""
    if not is_terminal():
        raise ConfigError(f"{name} is missing: ebft init asks for it in a terminal only. {question}: add it.")
    return typer.prompt(question).strip()


class LaunchingCommand(shared.ConfigCommand):
    """A command whose words after -- are not arguments, but options for the launcher."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            end = args.index("--")
            ctx.meta[_PASSED_ON] = tuple(args[end + 1 :])
            args = args[:end]
        return super().parse_args(ctx, args)


def checked_plan(config: Path, overrides: Sequence[str], options: LaunchOptions) -> tuple[RunConfig, Plan]:
    """The config and how its run is started, both checked; if processes are started, they give the warnings."""
    with warnings.catch_warnings(record=True) as found:
        run_config = load_config(config, overrides)
        say_loading()
        plan = plan_launch(options, run_config)
        check_runnable(run_config, plan.processes if plan.launcher else None)
    for warning in found if plan.launcher is None else ():
        warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
    return run_config, plan


def check_not_launched(option: str) -> None:
    """Raise ConfigError in a process of a launcher, where each process would do what `option` does once."""
    if is_launched():
        raise ConfigError(f"{option} starts the processes itself. Use --num-processes in place of a launcher.")


def train_sweep(
    file: Path, config: Path, overrides: Sequence[str], options: LaunchOptions, *, most: int, dry_run: bool
) -> int:
    """Train all combinations of a sweep, print their results, and return the exit status."""
    if options.machines > 1:
        raise ConfigError("--sweep runs on one machine. Remove --num-machines, or start its runs one by one.")
    check_not_launched("--sweep")

    def check(words: Sequence[str]) -> RunConfig:
        with warnings.catch_warnings(action="ignore"):  # each run gives its own
            return checked_plan(config, words, options)[0]

    runs = Sweep(config, overrides, read_sweep(file, most), options, check)
    if dry_run:
        for run in runs.runs:
            say(f"# {run.name}{': finished' if runs.is_finished(run) else ''}")
            say(shlex.join([sys.executable, "-m", "ebft", *runs.words(run)]))
        return 0
    status = runs.train_all(lambda line: say(line, err=True))
    print_table(runs.table())
    say(f"All metrics: {runs.folder / RESULTS}")
    return status


@polite
def train(
    context: typer.Context,
    config: Annotated[
        Path | None, argument("[CONFIG]", "The YAML config file; not needed with --model and --data.")
    ] = None,
    overrides: shared.Overrides = None,
    model: ModelOption = None,
    data: Annotated[list[str] | None, option("PATH", f"{DATA_HELP} Can be repeated.")] = None,
    method: MethodOption = None,
    tui: Annotated[
        bool | None,
        typer.Option(
            "--tui/--no-tui",
            show_default=False,
            help="Show a terminal dashboard. Training runs in another process, with its output in train.log in "
            "output_dir; Ctrl-C stops it and saves a checkpoint of the last completed step, q closes the dashboard. "
            "Requires the package textual.",
        ),
    ] = None,
    sweep: Annotated[
        Path | None,
        option(
            "FILE",
            "Train every combination of a YAML file one after another, each in its own folder in output_dir, and "
            "compare them on the held-out rows. The file maps keys to lists of values, or lists mappings, one per run. "
            "The same command again skips finished runs and resumes others.",
        ),
    ] = None,
    max_runs: Annotated[
        int, option("N", f"Largest number of runs of --sweep. Default: {MOST_RUNS}.", min=1)
    ] = MOST_RUNS,
    dry_run: Annotated[
        bool,
        _launch_option(None, "Print the command of the processes or the runs of a sweep, and exit.", names="--dry-run"),
    ] = False,
    launcher: Annotated[
        Literal["accelerate", "torchrun", "python"] | None,
        _launch_option(
            "NAME",
            "accelerate, torchrun, or python for one process. Default: accelerate if several processes are started. "
            "Options after -- are passed on to it.",
        ),
    ] = None,
    num_processes: Annotated[
        int | None,
        _launch_option("N", "Processes on all machines together. Default: one per visible GPU, one on CPU.", min=1),
    ] = None,
    num_machines: Annotated[
        int | None, _launch_option("N", "Number of machines; the command runs on each machine. Default: 1.", min=1)
    ] = None,
    machine_rank: Annotated[
        int | None, _launch_option("R", "Number of this machine, from 0; each machine has another one.", min=0)
    ] = None,
    main_process_ip: Annotated[
        str | None, _launch_option("ADDRESS", "Address of machine 0, the same on all machines.")
    ] = None,
    main_process_port: Annotated[
        int | None,
        _launch_option(
            "PORT",
            "Port of machine 0, the same on all machines. Default: 29500, or a free port on one machine.",
            min=1,
            max=65535,
        ),
    ] = None,
) -> None:
    """Train a model with the settings of a config.

    With several GPUs, one process per GPU is started.

    Without a config, --model and --data are trained with the config that `ebft init` proposes for them, which is
    written to train.yaml in output_dir.

    \b
    Examples:
      ebft train run.yaml
      ebft train run.yaml ebft.stride=4 learning_rate=1e-5
      ebft train run.yaml --ebft.stride 4 --learning-rate 1e-5
      ebft train --model smollm2-135m --data my_rows.jsonl num_epochs=1
      ebft train run.yaml --tui
      ebft train run.yaml resume_from_checkpoint=model-out/checkpoint-50
      ebft train run.yaml --num-processes 2
      ebft train run.yaml --sweep sweep.yaml
    """
    join_launch()
    config, overrides = _config_and_overrides(config, overrides or [], model, data or [], method, dry_run)
    words = [str(config), *overrides]
    given = {name: context.params[name] for name in LaunchOptions.__dataclass_fields__.keys() - {"passed_on"}}
    options = LaunchOptions(**given, passed_on=context.meta.get(_PASSED_ON, ()))
    if sweep is not None:
        os.environ[DASHBOARD] = "0"  # in its runs
        status = train_sweep(sweep, config, words[1:], options, most=max_runs, dry_run=dry_run)
        raise typer.Exit(status)
    run_config, plan = checked_plan(config, words[1:], options)
    if tui is None:
        tui = not dry_run and wants_dashboard(run_config.tui.enabled)
    if dry_run:
        from ebft.tools.launch.agent import shell_command

        say(shell_command(plan, ["train", *words]))
        return
    if tui:
        raise typer.Exit(train_with_dashboard([*words, *options.words()], Path(run_config.output_dir)))
    if plan.note:
        say(plan.note, err=True)
    if plan.launcher not in (None, RAY):
        from ebft.tools.launch import agent

        raise typer.Exit(agent.launch(plan, ["train", *words]))
    (train_here if plan.launcher is None else train_in_ray)(run_config, config, overrides)


def _config_and_overrides(
    config: Path | None, overrides: list[str], model: str | None, data: list[str], method: str | None, dry_run: bool
) -> tuple[Path, list[str]]:
    """The config to train, which is written first if --model and --data are given instead."""
    is_override = config is not None and "=" in str(config) and not config.exists()
    if not (model or data or method):
        if config is None or is_override:
            raise ConfigError("Missing argument 'CONFIG'. Give the path of a config, or --model and --data.")
        return config, overrides
    if is_override:
        overrides = [str(config), *overrides]
    elif config is not None:
        raise ConfigError(f"{config} and --model, --data or --method: a config contains them. Remove one.")
    check_not_launched("--model with --data")
    return config_of_data(model, data, method, overrides, dry_run)


def train_here(run_config: RunConfig, config: Path, overrides: list[str]) -> None:
    """Train in this process with the settings of the file `config` and `overrides`, and print what to do next."""
    from ebft.run.training import train  # imports torch, which is slow and not needed for help and config errors

    result = train(run_config, launch_command(["ebft", "train", str(config), *overrides]))
    if is_main_process():
        typed, evaluate = after_training(run_config, config, overrides)
        say_result(result.describe_outcome(evaluate), run_config, Path(result.output_dir), typed)
    leave_process_group()


def train_in_ray(run_config: RunConfig, config: Path, overrides: list[str]) -> None:
    """Train in Ray workers with the settings of the file `config` and `overrides`, and print what to do next."""
    from ebft.tools.launch.ray_driver import train_with_ray

    command = typed_command(["ebft", "train", str(config), *overrides])
    typed, evaluate = after_training(run_config, config, overrides)
    outcome, _ = train_with_ray(run_config, read_values(config, overrides), command, evaluate)
    if outcome.status:
        say(outcome.message, err=True)
        raise typer.Exit(outcome.status)
    say_result(outcome.learned, run_config, Path(run_config.output_dir), typed)


def say_result(learned: str, config: RunConfig, folder: Path, typed: list[str]) -> None:
    """Print what a complete run learned, where its model is, and what to do next; `typed`: its config and overrides."""
    say(learned, err=True)
    say(f"Model saved in {folder}")
    for line in what_next(config, folder, typed):
        say(line, err=True)


def after_training(run_config: RunConfig, config: Path, overrides: list[str]) -> tuple[list[str], str | None]:
    """The config and overrides for commands on the result; the command that compares the model with its base model."""
    typed = [str(config), *(each for each in overrides if not each.startswith("resume_from_checkpoint="))]
    compare = shlex.join(["ebft", "evaluate", *typed, "--output", str(Path(run_config.output_dir) / EVALUATION)])
    return typed, compare if run_config.method.can_be_compared else None


def what_next(config: RunConfig, folder: Path, typed: list[str]) -> list[str]:
    """Where the report of the run in `folder` is, and the commands that show, sample from and merge its results."""
    commands = [["show", str(folder)]] if rollout_files(folder) else []
    if config.method.generates_text:
        commands.append(["inference", str(folder)])
        base = base_name(config.base_model, config.gguf_file)
        if config.adapter is not None and (config.load_in_4bit or config.load_in_8bit):
            commands.append(["merge-lora", *typed])
        elif config.adapter is not None and is_gguf(base):  # its weights are converted first
            commands += [["fetch", base], ["merge-lora", str(folder), "--base-model", str(Path(base).with_suffix(""))]]
        elif config.adapter is not None:
            commands.append(["merge-lora", str(folder)])
    report = folder / REPORT
    following = "; ".join(shlex.join(["ebft", *command]) for command in commands)
    return [*([f"Report: {report}"] if report.is_file() else []), *([f"Next: {following}"] if following else [])]


def leave_process_group() -> None:
    """Close the process group of the launch: leaving this to the exit of the interpreter may abort the process."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


DASHBOARD = "EBFT_TUI"  # environment variable; training that was started with its dashboard has it set to 0
_OFF = ("0", "false", "no", "off")  # values of it and of tui.enabled
_OUTPUT_LINES = 12  # of the training process, shown if it fails
_LAST_LINES = 3  # shown if it finishes: where the model and the report are, and what to do next


@polite
def tui(folder: shared.RunFolder) -> None:
    """Follow a run in a terminal dashboard, from the files in its output folder.

    The run may be running, also on another machine with the same file system, or have ended. Closing the dashboard does
    not affect it. Requires the package textual, which the extra `tui` of ebft installs.

    Keys: 1 to 5 switch between curves, rollouts, health messages, log and config; q or Ctrl-C closes.

    \b
    Examples:
      ebft tui outputs/run
      ebft train run.yaml --tui
    """
    check_terminal("ebft tui")
    check_run(folder)
    from ebft.tools.dashboard.tui import Dashboard

    Dashboard(folder).run()


def wants_dashboard(in_config: bool) -> bool:
    """Whether the environment or the config asks for the dashboard, and it can be shown."""
    asked = {name: os.environ[name].lower() for name in (DASHBOARD, "AXOLOTL_TUI") if os.environ.get(name)}
    name, value = next(iter(asked.items()), ("tui.enabled", str(in_config).lower()))
    if value in _OFF or is_launched():
        return False
    if not is_terminal():
        warn(f"{name}: {value} has no effect: training was not started in a terminal.")
        return False
    return True


def is_terminal() -> bool:
    """Whether the command was started in a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def check_terminal(command: str) -> None:
    """Raise RunError if the dashboard cannot be shown."""
    missing = "a terminal, which `ebft report FOLDER` and `ebft show FOLDER` do not" if not is_terminal() else None
    if find_spec("textual") is None:
        missing = "the package textual: pip install 'ebft[tui]'"
    if missing is not None:
        raise RunError(f"{command} requires {missing}")


def train_with_dashboard(arguments: list[str], folder: Path) -> int:
    """Run `ebft train ARGUMENTS` in another process beside the dashboard; returns the exit status. If the dashboard
    fails, this waits for the training process instead, and passes Ctrl-C on to it."""
    check_terminal("ebft train --tui")
    check_not_launched("--tui")
    from ebft.tools.dashboard.tui import Training, TrainingDashboard

    training = Training(arguments, folder)
    try:
        result = TrainingDashboard(folder, training).run()
    except Exception as error:  # errors of the dashboard must not end the training
        say(traced(error), err=True)
        result = None
    if training.is_running() and result == "left":
        say(
            f"Training goes on in process {training.pid}, with its output in {training.log}. Follow it with "
            f"`ebft tui {folder}`, stop it with `kill -INT {training.pid}`."
        )
        return 0
    if training.is_running() and result is None:
        say(f"The dashboard ended. Waiting for training (process {training.pid}, output in {training.log}).")
    status = training.wait()
    for line in training.output(_LAST_LINES if status == 0 else _OUTPUT_LINES):
        say(line, err=status != 0)
    return status
