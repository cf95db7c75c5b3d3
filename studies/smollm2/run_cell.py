"""One cell: train, measure, and keep the result as a JSON file of its own, which a later run of the study finds."""

from __future__ import annotations

import gc
import shlex
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import measure
import settings
import stored
import yaml
from budget import cost_of, matched_steps
from cells import Cell, flops_of
from filelock import FileLock
from quickstart.phases import fingerprint
from scale import Scale
from settings import Place
from sweep import chosen_rate

# Curves of the report.
LOGGED = ("loss", "reward", "ebft/alignment", "ebft/diversity", "ebft/cfm_loss", "ebft/ce_loss", "entropy")
MEASUREMENT = 1  # raise it where the code measures something else: all cells are then out of date
PATH_KEYS = ("base_model", "datasets", "test_datasets", "output_dir")  # of a config, which results do not depend on


@dataclass(frozen=True)
class Job:
    """A cell with all that its result depends on; `made_from` has the fingerprints of base model and data files."""

    cell: Cell
    scale: Scale
    place: Place
    results: Path
    made_from: dict[str, str]

    @property
    def folder(self) -> Path:
        return self.results / (stored.SWEEP if self.cell.measures == "sweep" else stored.CELLS)

    @property
    def rate(self) -> float | None:
        return chosen_rate(self.results, self.cell)

    @property
    def steps(self) -> int:
        """Optimizer steps. Raises ValueError where they follow from the costs of cells without result."""
        if self.cell.method == "sft_flops":
            others = flops_of(self.cell)
            found = [stored.read(self.folder / f"{cell.name}.json") for cell in others]
            missing = [cell.name for cell, result in zip(others, found) if result is None]
            if missing:
                raise ValueError(f"its steps follow from the FLOPs of {' and '.join(missing)}: run these first")
            return matched_steps(*([result["cost"]] for result in found))
        return self.scale.sweep_steps if self.cell.measures == "sweep" else self.scale.steps

    @property
    def stamp(self) -> str:
        """Changes with everything that the result depends on but the code of ebft, the machine, and its libraries.

        Paths are no part of it.
        """
        cell, scale = self.cell, self.scale
        parts: list[Any] = [MEASUREMENT, asdict(cell), self.made_from["base"]]
        parts += [made for name, made in sorted(self.made_from.items()) if name in self._read_files()]
        parts += [without_paths("evaluation"), settings.evaluation_changes(scale, cell.task, "test")]
        parts += [settings.evaluation_changes(scale, cell.task, "long"), scale.sampling, scale.humaneval]
        if cell.start == "warm":
            parts += [without_paths("sft"), scale.warm_steps]
        if cell.method != "none":
            parts += [without_paths(cell.method), settings.changes(scale, cell, self.steps, self.rate)]
        return fingerprint(parts)

    def _read_files(self) -> list[str]:
        """Names of the data files that the result depends on."""
        parts = {"task": ["test", "long"], "sweep": ["validation"], "humaneval": []}[self.cell.measures]
        parts += ["warm"] if self.cell.start == "warm" else []
        parts += ["train"] if self.cell.method != "none" else []
        own = [f"{self.cell.task}_{part}" for part in parts]
        return own + (["humaneval"] if self.cell.measures == "humaneval" else [])


def finished(job: Job) -> dict[str, Any] | None:
    """The result of an earlier run of this very job, if there is one."""
    try:
        result = stored.read(job.folder / f"{job.cell.name}.json")
        return result if result is not None and result.get("stamp") == job.stamp else None
    except ValueError:  # a broken file, or steps that nothing says yet
        return None


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
    result = {**about, **(trained if job.cell.measures != "humaneval" else {}), **found}
    stored.write_cell(job.folder, result)
    gc.collect()
    return result


def measured(job: Job, model: str, clock: Clock) -> dict[str, Any]:
    """Everything that is measured of the cell's model, joined."""
    task, place, scale = job.cell.task, job.place, job.scale
    if job.cell.measures == "humaneval":
        return joined([("humaneval", clock.time("humaneval", lambda: measure.on_humaneval(model, place, scale)))])
    part = "validation" if job.cell.measures == "sweep" else "test"
    file = f"{task}_{part}"
    found = [(file, clock.time("features", lambda: measure.features(model, place, scale, task, part)))]
    if task in measure.JUDGES and (part == "test" or job.cell.method == "rlvr"):
        found.append((file, clock.time("completions", lambda: measure.completions(model, place, scale, task, part))))
    if part == "test":
        long = clock.time("long", lambda: measure.features(model, place, scale, task, "long"))
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
    """Train the cell's adapter into its folder, on from its last checkpoint: what that cost, and its curves.

    Where two cells share the model, the second finds it trained.
    """
    from ebft import load_config, train

    folder = job.place.model(job.cell)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        started_anew(folder, job)
        overrides = settings.cell_overrides(job.place, job.scale, job.cell, job.steps, job.rate)
        config = load_config(settings.config_file(job.cell.method), overrides)
        result = train(config)
    return {
        "learning_rate": config.learning_rate,
        "cost": cost_of(result.metrics, config),
        "log": curves(result.trainer.state.log_history),
    }


def started_anew(folder: Path, job: Job) -> None:
    """Empty a folder whose checkpoints are of other settings, data or models than the job's."""
    cell, made_from = job.cell, job.made_from
    data = [made_from[f"{cell.task}_{part}"] for part in ("train", *(["warm"] if cell.start == "warm" else []))]
    changes = settings.changes(job.scale, cell, job.steps, job.rate)
    mark = fingerprint([made_from["base"], data, without_paths(cell.method), changes])
    stamp = folder / "made_from.txt"
    if not stamp.is_file() or stamp.read_text() != mark:
        shutil.rmtree(folder)
        folder.mkdir()
        stamp.write_text(mark)


def command_of(job: Job) -> str:
    """What repeats the cell from the repository's root, data and all."""
    scale = [] if job.scale.name == "smollm2" else ["--scale", job.scale.name]
    sweep = ["--sweep"] if job.cell.measures == "sweep" else []
    return shlex.join(["python", "studies/smollm2/run.py", *scale, *sweep, "--only", job.cell.name])


def without_paths(method: str) -> dict[str, Any]:
    """The content of a method's config without its paths."""
    found = yaml.safe_load(settings.config_file(method).read_text(encoding="utf-8"))
    return {key: value for key, value in found.items() if key not in PATH_KEYS}


def curves(log_history: list[dict[str, float]]) -> dict[str, list[list[float]]]:
    """[step, value] pairs of the metrics in `LOGGED`."""
    found = {
        name: [[entry["step"], float(f"{entry[name]:.4g}")] for entry in log_history if name in entry]
        for name in LOGGED
    }
    return {name: points for name, points in found.items() if points}


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
