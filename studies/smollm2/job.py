"""A cell with all that its result depends on, and whether there is a result of that already."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import settings
import stored
import yaml
from budget import matched_steps
from cells import SHARES, Cell, flops_of
from scale import Scale
from settings import Place
from sweep import chosen_rate

from ebft.tools.quickstart.run import fingerprint

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
            return matched_steps(*([result["cost"]] for result in self._costs()))
        if self.cell.method == "structured":
            return self.scale.structured_steps
        if self.cell.measures == "sweep":
            return self.scale.sweep_steps
        fewer = self.scale.fewer_steps
        return fewer.get(self.cell.task, fewer.get(self.cell.start, self.scale.steps))

    @property
    def flops(self) -> float | None:
        """FLOPs after which training ends; None where its steps are known. Raises ValueError as `steps` does."""
        if self.cell.method != "sdft":
            return None
        return self._costs()[-1]["cost"]["flops"] * SHARES.get(self.cell.group, 1)

    @property
    def changes(self) -> list[str]:
        """Overrides of the method's config that are no paths."""
        return settings.changes(self.scale, self.cell, self.steps, self.rate, self.flops)

    def _costs(self) -> list[dict[str, Any]]:
        """The results whose FLOPs this job takes."""
        others = flops_of(self.cell)
        found = [stored.read_cell(self.folder / f"{cell.name}.json") for cell in others]
        missing = [cell.name for cell, result in zip(others, found) if result is None]
        if missing:
            raise ValueError(f"its steps follow from the FLOPs of {' and '.join(missing)}: run these first")
        return found

    @property
    def stamp(self) -> str:
        """Changes with everything that the result depends on but the code of ebft, the machine, and its libraries.

        Paths are no part of it.
        """
        cell, scale = self.cell, self.scale
        parts: list[Any] = [MEASUREMENT, asdict(cell), self.made_from["base"]]
        parts += [made for name, made in sorted(self.made_from.items()) if name in self._read_files()]
        parts += [without_paths("evaluation"), settings.evaluation_changes(scale, cell, "test")]
        parts += [settings.evaluation_changes(scale, cell, "long"), scale.sampling]
        if cell.start == "warm":
            parts += [without_paths("sft"), scale.warm_steps]
        if cell.method != "none":
            parts += [without_paths(cell.method), self.changes]
        return fingerprint(parts)

    def _read_files(self) -> list[str]:
        """Names of the data files that the result depends on."""
        parts = {"task": ["test", "long"], "sweep": ["validation"]}[self.cell.measures]
        parts += ["warm"] if self.cell.start == "warm" else []
        parts += ["train"] if self.cell.method != "none" else []
        return [f"{self.cell.task}_{part}" for part in parts]


def finished(job: Job) -> dict[str, Any] | None:
    """The result of an earlier run of this very job, if there is one."""
    try:
        result = stored.read_cell(job.folder / f"{job.cell.name}.json")
        return result if result is not None and result.get("stamp") == job.stamp else None
    except ValueError:  # a broken file, or steps that nothing says yet
        return None


def command_of(job: Job) -> str:
    """What repeats the cell from the repository's root, data and all."""
    scale = [] if job.scale.name == "smollm2" else ["--scale", job.scale.name]
    sweep = ["--sweep"] if job.cell.measures == "sweep" else []
    return shlex.join(["python", "studies/smollm2/run.py", *scale, *sweep, "--only", job.cell.name])


def without_paths(method: str) -> dict[str, Any]:
    """The content of a method's config without its paths."""
    found = yaml.safe_load(settings.config_file(method).read_text(encoding="utf-8"))
    return {key: value for key, value in found.items() if key not in PATH_KEYS}
