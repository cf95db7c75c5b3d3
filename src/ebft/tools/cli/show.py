"""`ebft show FOLDER` and `ebft report FOLDER`."""

import difflib
import json
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ebft.errors import RunError
from ebft.printed import printable_json, safe_console, say
from ebft.run_files import check_rollouts, check_run, read_object
from ebft.tools.cli.arguments import RunFolder, complete_term
from ebft.tools.cli.console import listing, polite
from ebft.tools.dashboard.report import write_report
from ebft.tools.dashboard.rollouts import REWARD, Sample, all_samples, sample_text, take, without_repetitions

COUNT, COUNT_INTERACTIVE = 5, 200


@listing
def show(
    folder: RunFolder,
    best: Annotated[bool, typer.Option("--best", help="The best rollouts by --sort, best first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="The worst rollouts by --sort, worst first.")] = False,
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="TERM",
            help="A term: reward (default), alignment, diversity, advantage, length, or rewards/NAME of a reward "
            "function. Higher is better, except for diversity. Implies --best without --worst.",
            show_default=False,
            autocompletion=complete_term,
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Only rollouts of optimizer step N, counted from 1 as in the logs.", show_default=False
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            "--count",
            "-n",
            min=1,
            metavar="N",
            help=f"Number of rollouts. Default: {COUNT}, or {COUNT_INTERACTIVE} with --interactive.",
            show_default=False,
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Show whole prompts instead of their last 400 characters.")] = (
        False
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
    interactive: Annotated[bool, typer.Option("--interactive", "-i", help="Browse in a pager.")] = False,
) -> None:
    """Show the rollouts of a run with their references and the terms of their rewards.

    Requires rollouts.jsonl in the folder: set ebft.log_completions: true (strided mode) or trl.log_completions: true
    (structured mode, GRPO).

    Examples:

    ebft show outputs/run

    ebft show outputs/run --worst --sort alignment --count 20

    ebft show outputs/run --step 10 --best --json
    """
    if best and worst:
        raise RunError("--best and --worst exclude each other. Keep one of them.")
    if interactive and as_json:
        raise RunError("--interactive and --json exclude each other. Keep one of them.")
    if interactive and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise RunError("--interactive requires a terminal. Leave it out to print the rollouts.")
    check_rollouts(folder)
    order: Literal["best", "worst", "newest"] = "worst" if worst else "best" if best or sort else "newest"
    count = count or (COUNT_INTERACTIVE if interactive else COUNT)
    found = all_samples(folder, step)
    samples = take(found if as_json else without_repetitions(found), order, sort or REWARD, count)
    if not samples:
        raise RunError(_nothing(folder, step, sort if order != "newest" else None))
    if as_json:
        print(printable_json(json.dumps([_as_object(sample) for sample in samples], indent=2, ensure_ascii=False)))
        return
    console = safe_console(soft_wrap=True, highlight=False)
    os.environ.setdefault("LESS", "-R")  # shows colours
    with console.pager(styles=True) if interactive else nullcontext():
        for sample in samples:
            console.print(sample_text(sample, full), end="\n\n")


def _as_object(sample: Sample) -> dict[str, Any]:
    """A sample of the JSON list, which contains every copy of a completion."""
    return {name: value for name, value in asdict(sample).items() if name != "copies"}


def _nothing(folder: Path, step: int | None, sort: str | None) -> str:
    """Why no rollout was found, with what there is instead."""
    steps, terms = set(), {}
    for sample in all_samples(folder):
        steps.add(sample.step)
        terms |= dict.fromkeys(sample.terms)
    if not steps:
        return f"{folder} has no rollouts yet, or its files cannot be read."
    if step is not None and step not in steps:
        return f"{folder} has no rollouts of step {step}. It has steps {min(steps)} to {max(steps)}."
    near = difflib.get_close_matches(str(sort), terms, n=1)
    meant = f"Did you mean {near[0]!r}? " if near else ""
    return f"--sort: no rollout has a term {sort!r}. {meant}Choose from {', '.join(terms)}."


@polite
def report(
    folder: RunFolder,
    evaluation: Annotated[
        Path | None,
        typer.Option(
            "--evaluation",
            metavar="FILE.json",
            help="Include this result of `ebft evaluate --output`. Default: evaluation.json in the folder, if any.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write report.html into the output folder of a run: curves, samples, health messages, config and evaluation.

    `ebft train` writes it at the end of a run. The page is a single file without external resources.

    Examples:

    ebft report outputs/run

    ebft evaluate run.yaml --output outputs/run/evaluation.json && ebft report outputs/run
    """
    check_run(folder)
    if evaluation is not None and not evaluation.is_file():
        raise RunError(f"--evaluation: the file {evaluation} does not exist. Write it with `ebft evaluate --output`.")
    if evaluation is not None and "models" not in (read_object(evaluation) or {}):
        raise RunError(f"--evaluation: {evaluation} is not a result of `ebft evaluate --output`.")
    try:
        path = write_report(folder, evaluation)
    except OSError as error:
        raise RunError(f"The report cannot be written to {folder} ({error}).") from error
    say(path)
