"""EBFT beside SFT and RLVR on the source of Python's standard library: base model, runs, measurements, report.

    python studies/stdlib-code/run.py --size small     # about an hour on two CPU cores
    python studies/stdlib-code/run.py --size large     # a 100M model, on an accelerator
    python studies/stdlib-code/run.py --size small --sweep     # learning rates for the above: results/small-sweep.json
    python studies/stdlib-code/run.py --report         # README.md again, from results/*.json

A stopped run goes on where it was: the same command again. Exit status 1 where a cell failed, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

# Before torch is imported: threads that spin while they wait take the cores from whoever else uses the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import project  # noqa: E402
from budget import matched_steps  # noqa: E402
from cells import CENTRE, TASKS, Cell, all_cells, waits_for_others  # noqa: E402
from quickstart.phases import console, fingerprint, make_once  # noqa: E402
from run_cell import Job, finished, machine_card, run_cell  # noqa: E402
from sizes import SIZES, Size  # noqa: E402
from stored import store, store_sweep  # noqa: E402
from sweep import SEED, best_rates, chosen_rate, sweep_cells, tried  # noqa: E402
from workers import run_all  # noqa: E402


def main() -> int:
    """Run the study; returns the exit status."""
    arguments = read_arguments()
    try:
        failed = {}
        if not arguments.report:
            size = SIZES[arguments.size]
            output = (arguments.output or Path("outputs/study") / size.name).resolve()
            workers = default_workers() if arguments.workers is None else arguments.workers
            if not has_accelerator():
                os.environ["OMP_NUM_THREADS"] = "1"  # of the workers: one core each
            failed = (sweep if arguments.sweep else study)(size, output, arguments.results, workers, arguments.keep)
            if arguments.sweep:
                return 1 if failed else 0
        from report import write_report

        console.print(f"Report: {write_report(arguments.results, arguments.readme)}")
    except KeyboardInterrupt:
        console.print("\n[yellow]Stopped. What is finished is kept: run the same command to go on.")
        return 130
    except (ValueError, OSError) as error:
        console.print("\n[bold red]Error:[/]", str(error), markup=False, highlight=False)
        return 2
    return 1 if failed else 0


def study(size: Size, output: Path, results: Path, workers: int, keep: bool = False) -> dict[str, str]:
    """Train and measure every cell and store the results; returns what went wrong, by the name of the cell."""
    started = time.perf_counter()
    made_from, rows = make_starts(size, output)
    cells = all_cells(size.seeds, size.settings)
    jobs = [Job(cell, size, output, made_from, rate=chosen_rate(results, size, cell), keep=keep) for cell in cells]
    done, failed = run_jobs([job for job in jobs if not waits_for_others(job.cell)], workers)
    later, impossible = with_steps([job for job in jobs if waits_for_others(job.cell)], done)
    more, failed_later = run_jobs(later, workers)
    failed = {**failed, **impossible, **failed_later}
    found = card_of(size, workers, "", started)
    if not done:
        raise ValueError(f"No cell finished, so that nothing is stored. Their logs: {output / 'logs'}")
    cells = [*done, *more]
    from corpus import sources

    store(results, size.name, {**found, "rows": rows, "failed": failed, "cells": cells}, sources(output / "data"))
    console.print(f"Results: {results / size.name}.json ({len(cells)} cells, {len(failed)} failed)")
    return failed


def sweep(size: Size, output: Path, results: Path, workers: int, keep: bool = False) -> dict[str, str]:
    """Try learning rates, and store the best ones for `study`; returns what went wrong, by the name of the cell.

    Nothing is stored where a run failed: a best rate of some would be taken for the best of all.
    """
    started = time.perf_counter()
    made_from, _ = make_starts(size, output)
    jobs = [Job(cell, size, output, made_from, keep=keep, part="validation") for cell in sweep_cells(size)]
    done, failed = run_jobs(jobs, workers)
    if failed:
        console.print(f"{len(failed)} cells failed: no learning rates are stored.", style="red")
        return failed
    found = tried(size, done)
    card = card_of(size, workers, " --sweep", started)
    found = {**card, "seed": SEED, "tried": found, "chosen": best_rates(found)}
    console.print(f"Learning rates: {store_sweep(results, size.name, found)}")
    return failed


def card_of(size: Size, workers: int, options: str, started: float) -> dict[str, Any]:
    """What was run, on what, and for how long: since `started`."""
    return {
        "size": size.name,
        "command": f"python studies/stdlib-code/run.py --size {size.name}{options}",
        "machine": {**machine_card(), "workers": workers},
        "seconds": round(time.perf_counter() - started),
    }


def make_starts(size: Size, output: Path) -> tuple[str, dict[str, int]]:
    """Corpus, base model and one warm start for each task, each made once; what they were made from, and rows."""
    import settings
    from corpus import count_rows, write_corpus

    corpus = [project.HERE / "corpus.py", project.HERE / "verifiers.py", project.ROOT / "examples/quickstart/corpus.py"]
    made_from: list[Any] = [sys.version, size.max_files, size.documents, size.raw_rows, size.piece]
    made_from += [path.read_text(encoding="utf-8") for path in corpus]
    console.print("[bold]Data: the source of this machine's Python standard library")
    data = output / "data"
    make_once(data, made_from, lambda: write_corpus(data, size))
    contents = {path.stem: fingerprint(path.read_text(encoding="utf-8")) for path in sorted(data.glob("*.jsonl"))}

    from quickstart.base_model import save_random_model

    from ebft import load_config, train
    from ebft.config.changed import changed_keys

    base = load_config(settings.config_file("base"), settings.base_overrides(output, size))
    made_from = [contents["pretrain"], size.vocab_size, size.shape, dict(changed_keys(base))]
    console.print("[bold]Base model: a tokenizer, random weights, plain pretraining")
    positions = base.sequence_len * 2
    make_once(
        output / "init", made_from, lambda: save_random_model(output / "init", data / "pretrain.jsonl", size, positions)
    )
    make_once(output / "base", made_from, lambda: train(base))
    for task in TASKS:
        warm = load_config(settings.config_file("sft"), settings.warm_overrides(output, size, task))
        made_from += [contents[f"{task}_train"], dict(changed_keys(warm))]
        console.print(f"[bold]Warm start: SFT, {task}")
        make_once(settings.start_folder(output, task, "warm"), made_from, lambda warm=warm: train(warm))
    return fingerprint([*made_from, contents]), count_rows(data)


def run_jobs(jobs: list[Job], workers: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Results of all jobs, those of an earlier run included, and what went wrong; a line for each that finishes."""
    found = {job.cell.name: result for job in jobs if (result := finished(job)) is not None}
    failed: dict[str, str] = {}
    missing = [job for job in jobs if job.cell.name not in found]
    if found:
        console.print(f"[green]{len(found)} cells are finished already")
    started = time.perf_counter()
    log_of = lambda job: job.output / "logs" / f"{job.cell.name}.txt"
    for number, (job, result, error) in enumerate(run_all(missing, run_cell, workers, log_of), start=1):
        if error is None:
            found[job.cell.name] = result
        else:
            failed[job.cell.name] = error
        left = (time.perf_counter() - started) / number * (len(missing) - number)
        outcome = f"failed: {error}  (see {log_of(job)})" if error else _spent(result)
        line = f"{number}/{len(missing)}  {job.cell.name}  {outcome}  about {left / 60:.0f} min left"
        console.print(line, style="red" if error else None, markup=False, highlight=False)
    return [found[job.cell.name] for job in jobs if job.cell.name in found], failed


def with_steps(jobs: list[Job], done: list[dict[str, Any]]) -> tuple[list[Job], dict[str, str]]:
    """The jobs with the steps that other cells' FLOPs give them, and why some cannot have any."""
    found, impossible = [], {}
    for job in jobs:
        try:
            steps = matched_steps(costs(done, job.cell, "sft", ""), costs(done, job.cell, "ebft", CENTRE))
            found.append(replace(job, steps=steps))
        except ValueError as error:
            impossible[job.cell.name] = str(error)
            console.print(f"{job.cell.name}: {error}", style="red", markup=False)
    return found, impossible


def costs(done: list[dict[str, Any]], like: Cell, method: str, setting: str) -> list[dict[str, Any]]:
    """Costs of the finished runs of a method from the start that `like` has."""
    wanted = {"task": like.task, "start": like.start, "method": method, "setting": setting}
    return [result["cost"] for result in done if wanted.items() <= result["cell"].items()]


def default_workers() -> int:
    """One process for each core that this process may use; with an accelerator one in all, this one."""
    return 0 if has_accelerator() else len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def has_accelerator() -> bool:
    """Whether torch finds a GPU or the like."""
    import torch

    return torch.accelerator.is_available()


def _spent(result: dict[str, Any]) -> str:
    return f"{result['seconds']['train']:.0f} s training, {result['seconds']['evaluate']:.0f} s measuring"


def read_arguments() -> argparse.Namespace:
    """Size, folders, processes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="small", help="how large (default small)")
    parser.add_argument("--output", type=Path, help="folder of data, models and logs (default outputs/study/SIZE)")
    parser.add_argument("--workers", type=int, help="processes; 0 is this one (default: cores, or 0 with accelerator)")
    parser.add_argument("--keep", action="store_true", help="keep every model that this run trains")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--sweep", action="store_true", help="only choose learning rates, on the validation part")
    what.add_argument("--report", action="store_true", help="only write the report again")
    parser.add_argument("--results", type=Path, default=project.RESULTS, help=argparse.SUPPRESS)
    parser.add_argument("--readme", type=Path, default=project.HERE / "README.md", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.workers is not None and arguments.workers < 0:
        parser.error("--workers cannot be below 0")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
