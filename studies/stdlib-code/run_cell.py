"""One cell: train, measure, and keep the result as a JSON file of its own, which a later run of the study finds."""

from __future__ import annotations

import gc
import json
import os
import shlex
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import measure
import project
import settings
from budget import cost_of
from cells import Cell
from quickstart.phases import fingerprint
from sizes import Size
from stored import write_json

# Curves of the report.
LOGGED = ("loss", "reward", "ebft/alignment", "ebft/diversity", "ebft/cfm_loss", "ebft/ce_loss", "entropy")
# What measures and rewards completions.
JUDGES = ("measure.py", "verifiers.py", "rewards.py", "sandbox.py")


@dataclass(frozen=True)
class Job:
    """A cell with all that its result depends on; `made_from` is the fingerprint of corpus and base model.

    `steps` and `rate` replace those of the method's config; `part` is what is measured on, test or validation.
    """

    cell: Cell
    size: Size
    output: Path
    made_from: str
    steps: int | None = None
    rate: float | None = None
    keep: bool = False
    part: str = "test"

    @property
    def result_file(self) -> Path:
        return self.output / "cells" / f"{self.cell.name}.json"

    @property
    def stamp(self) -> str:
        """Changes with everything that the result depends on but the code of ebft, the machine, and its libraries."""
        evaluation = settings.evaluation_overrides(self.output, self.size, self.cell.task, self.part)
        parts = [self.made_from, asdict(self.cell), evaluation, settings.config_file("evaluation").read_text()]
        parts += [(project.HERE / name).read_text() for name in JUDGES]
        if self.cell.method != "none":
            parts += [settings.config_file(self.cell.method).read_text(), self.overrides]
        return fingerprint(parts)

    @property
    def overrides(self) -> list[str]:
        return settings.cell_overrides(self.output, self.size, self.cell, self.steps, self.rate)


def finished(job: Job) -> dict[str, Any] | None:
    """The result of an earlier run of this very job, if there is one."""
    try:
        result = json.loads(job.result_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) and result.get("stamp") == job.stamp else None


def run_cell(job: Job) -> dict[str, Any]:
    """Train and measure, write the result's file and return the result."""
    started, stamp, card = time.perf_counter(), job.stamp, machine_card()
    trained = train_cell(job) if job.cell.method != "none" else {}
    model = job.output / "models" / job.cell.name if trained else _start(job)
    between = time.perf_counter()
    found = measure.measure(model, job.output, job.size, job.cell.task, job.part)
    seconds = {"train": round(between - started, 1), "evaluate": round(time.perf_counter() - between, 1)}
    cell = {**asdict(job.cell), "group": job.cell.group, "name": job.cell.name}
    result = {"cell": cell, "stamp": stamp, **trained, **found, "seconds": seconds, "machine": card}
    write_json(job.result_file, result)
    if trained and not job.keep:
        shutil.rmtree(model)
    gc.collect()
    return result


def train_cell(job: Job) -> dict[str, Any]:
    """Train the cell's model into its folder; what the run cost, its curves, and the command that does the same.

    The command is one for the study's folder, where the names of rewards are found.
    """
    from ebft import load_config, train

    file, overrides = settings.config_file(job.cell.method), job.overrides
    config = load_config(file, overrides)
    result = train(config)
    relative = [key.replace(str(job.output), os.path.relpath(job.output, project.HERE)) for key in overrides]
    command = shlex.join(["ebft", "train", os.path.relpath(file, project.HERE), *relative])
    return {
        "command": command,
        "learning_rate": config.learning_rate,
        "cost": cost_of(result.metrics, config),
        "log": curves(result.trainer.state.log_history),
    }


def curves(log_history: list[dict[str, float]]) -> dict[str, list[list[float]]]:
    """[step, value] pairs of the metrics in `LOGGED`."""
    found = {
        name: [[entry["step"], float(f"{entry[name]:.5g}")] for entry in log_history if name in entry]
        for name in LOGGED
    }
    return {name: points for name, points in found.items() if points}


def machine_card() -> dict[str, Any]:
    """What the numbers depend on beside configs and data: device, threads, versions, commit, date."""
    import torch

    from benchmarks.measuring import machine

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    return machine(device)


def _start(job: Job) -> Path:
    return settings.start_folder(job.output, job.cell.task, job.cell.start)
