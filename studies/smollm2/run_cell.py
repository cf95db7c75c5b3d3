"""One cell: train, measure, and keep the result as a JSON file of its own, which a later run of the study finds."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import measure
import settings
import stored
from budget import cost_of
from filelock import FileLock
from job import Job, command_of, finished, without_paths
from stored import empty_unless

from ebft.tools.quickstart.run import fingerprint

# Curves of the report.
LOGGED = ("loss", "reward", "ebft/alignment", "ebft/diversity", "ebft/cfm_loss", "ebft/ce_loss", "entropy")


def run_cell(job: Job) -> dict[str, Any]:
    """Train and measure, write the result's file and return the result; one that is there by now is returned as it is.

    That may be where the steps followed from a cell that was run just before.
    """
    there = finished(job)
    if there is not None:
        return there
    clock, stamp, card = Clock(), job.stamp, machine_card()
    trained = clock.time("train", lambda: train_cell(job)) if job.cell.method != "none" else {}
    model = str(job.place.model(job.cell)) if trained else job.place.start(job.cell)
    found = measured(job, model, clock)
    found["documents"] = {file: job.made_from[file] for file in set(found["measured_on"].values())}
    cell = {**asdict(job.cell), "group": job.cell.group, "name": job.cell.name}
    about = {"cell": cell, "stamp": stamp, "machine": card, "command": command_of(job), "seconds": clock.seconds}
    result = {**about, **trained, **found}
    stored.write_cell(job.folder, result)
    gc.collect()
    return result


def measured(job: Job, model: str, clock: Clock) -> dict[str, Any]:
    """Everything that is measured of the cell's model, joined."""
    task, place, scale = job.cell.task, job.place, job.scale
    part = "validation" if job.cell.measures == "sweep" else "test"
    file = f"{task}_{part}"
    found = [(file, clock.time("features", lambda: measure.features(model, place, scale, job.cell, part)))]
    if task in measure.JUDGES and part == "test":
        found.append(
            (file, clock.time("completions", lambda: measure.completions(model, place, scale, job.cell, part)))
        )
    if part == "test":
        long = clock.time("long", lambda: measure.features(model, place, scale, job.cell, "long"))
        found.append((f"{task}_long", renamed(long)))
    return joined(found)


def renamed(long: dict[str, Any]) -> dict[str, Any]:
    """Of a measurement of long rollouts the feature-matching loss, under a name of its own, and the curves."""
    metrics = {f"{name}_long": long["metrics"][name] for name in ("cfm_loss", "diversity")}
    parts = {f"{name}_long": long["per_document"][name] for name in ("cfm_loss", "diversity")}
    return {"metrics": metrics, "per_document": parts, "rollouts": long["rollouts"]}


def joined(found: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Measurements, each with the data file that it is on, as one; of curves the last ones are kept."""
    result: dict[str, Any] = {"metrics": {}, "per_document": {}, "measured_on": {}}
    for file, one in found:
        wanted = {name: part for name, part in one["per_document"].items() if is_kept(name)}
        result["metrics"] |= one["metrics"]
        result["per_document"] |= {name: stored.packed(part) for name, part in wanted.items()}
        result["measured_on"] |= dict.fromkeys(wanted, file)
        result |= {key: one[key] for key in ("rollouts", "shown") if key in one}
    return result


def is_kept(metric: str) -> bool:
    """Whether the report has use for what each document adds to a metric of `ebft evaluate`."""
    return metric not in ("ce_loss_all", "cfm_loss_plugin", "cfm_loss_whitened") and not metric.startswith(
        ("alignment_pass", "reward_pass")
    )


def train_cell(job: Job) -> dict[str, Any]:
    """Train the cell's adapter into its folder, on from its last checkpoint: what that cost, and its curves."""
    from ebft import load_config, train

    folder = job.place.model(job.cell)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(job.place.lock(job.cell)):
        empty_unless(folder, training_mark(job))
        overrides = settings.cell_overrides(job.place, job.scale, job.cell, job.steps, job.rate, job.flops)
        config = load_config(settings.config_file(job.cell.method), overrides)
        result = train(config)
    history = result.trainer.state.log_history
    cost = cost_of(result.metrics, config, result.trainer.state.global_step)
    found = {"learning_rate": config.learning_rate, "cost": cost, "log": curves(history)}
    return found if job.cell.method != "structured" else {**found, "phases": phases(history)}


def training_mark(job: Job) -> str:
    """Changes with settings, data and start of a cell's training."""
    cell, made_from = job.cell, job.made_from
    data = [made_from[f"{cell.task}_{part}"] for part in ("train", *(["warm"] if cell.start == "warm" else []))]
    return fingerprint([made_from["base"], data, without_paths(cell.method), job.changes])


def curves(log_history: list[dict[str, float]]) -> dict[str, list[list[float]]]:
    """[step, value] pairs of the metrics in `LOGGED`."""
    found = {
        name: [[entry["step"], float(f"{entry[name]:.4g}")] for entry in log_history if name in entry]
        for name in LOGGED
    }
    return {name: points for name, points in found.items() if points}


def phases(log_history: list[dict[str, float]]) -> dict[str, float]:
    """Mean seconds of each phase of a step whose rollouts are sampled ahead, without the first step, which is not.

    `generation` runs beside the others; a step takes the sum of `wait` for its rollouts, `reward` and `update`.
    """
    steps = [entry for entry in log_history if "rollouts/wait_s" in entry][1:]
    if not steps:
        return {}
    mean = lambda name: sum(entry[name] for entry in steps) / len(steps)
    found = {name: mean(f"rollouts/{name}_s") for name in ("generation", "wait", "reward")}
    return {**found, "update": mean("step_time") - found["wait"] - found["reward"]}


class Clock:
    """Seconds that each part of a cell took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, name: str, run: Callable[[], Any]) -> Any:
        """What `run` returns, its time kept under `name`."""
        started = time.perf_counter()
        result = run()
        self.seconds[name] = round(time.perf_counter() - started, 1)
        return result


def machine_card() -> dict[str, Any]:
    """What the numbers depend on beside configs and data: device, threads, versions, commit, date."""
    import torch

    from benchmarks.measuring import machine

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    return machine(device)
