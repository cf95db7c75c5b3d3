"""From a cell to the config that trains it and the configs that measure it: YAML files and overrides, nothing else.

Every path of a run is in a Place, so that overrides without one (`changes`) say what a result depends on.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import project
from cells import Cell
from scale import Scale

# A method's config file; the warm start is an SFT run.
CONFIG_OF = {
    **{name: name for name in ("sft", "sdft", "ebft", "rlvr", "structured", "evaluation")},
    "sft_flops": "sft",
}
FLOAT32 = "torch_dtype=float32"
VLLM_PYTHON = "EBFT_VLLM_PYTHON"  # environment variable: the interpreter of an environment with vLLM
RAW_ROWS = "ebft_pretrain.transform"
LINE = "trl.generation_kwargs.stop_token_ids=[198]"  # a line break, with which translations end


@dataclass(frozen=True)
class Place:
    """Where a study keeps its data and models, and its pretrained model."""

    output: Path
    base_model: str  # a folder, or a name that configs know

    def data(self, task: str, part: str) -> Path:
        """A part of a task's data."""
        return self.output / "data" / f"{task}_{part}.jsonl"

    def warm(self, task: str) -> Path:
        """The adapter of a task's warm start."""
        return self.output / f"warm-{task}"

    def model(self, cell: Cell) -> Path:
        """Where a cell's adapter goes."""
        return self.output / "models" / cell.name

    def lock(self, cell: Cell) -> Path:
        """The file that whoever trains the cell's model holds. A name may have a dot, in a learning rate."""
        return Path(f"{self.model(cell)}.lock")

    def start(self, cell: Cell) -> str:
        """What a cell's training starts from, as `--model` of `ebft evaluate` names it."""
        return self.base_model if cell.start == "base" else str(self.warm(cell.task))


def config_file(method: str) -> Path:
    """The YAML file of a method."""
    return project.CONFIGS / f"{CONFIG_OF[method]}.yaml"


def warm_overrides(place: Place, scale: Scale, task: str) -> list[str]:
    """Overrides of sft.yaml for the warm start of a task."""
    paths = [*_paths(place, task, "warm"), f"output_dir={place.warm(task)}"]
    changed = [*_rows(task), FLOAT32, *scale.methods.get("sft", ())]
    return [*paths, *changed, f"max_steps={scale.warm_steps}"]


def cell_overrides(
    place: Place, scale: Scale, cell: Cell, steps: int, rate: float | None, flops: float | None
) -> list[str]:
    """Overrides of the config of a cell's method, paths and all."""
    paths = [*_paths(place, cell.task, "train"), f"output_dir={place.model(cell)}"]
    paths += [f"lora_model_dir={place.warm(cell.task)}"] if cell.start == "warm" else []
    if cell.method == "structured" and VLLM_PYTHON in os.environ:
        paths += [f"vllm.python={os.environ[VLLM_PYTHON]}"]
    return [*paths, *changes(scale, cell, steps, rate, flops)]


def changes(scale: Scale, cell: Cell, steps: int, rate: float | None, flops: float | None) -> list[str]:
    """Overrides of a cell's config that are no paths; `rate` is None for the config's own, `flops` ends a run."""
    found = [*_rows(cell.task), *precision(cell), *scale.methods.get(CONFIG_OF[cell.method], ())]
    found += [f"max_steps={steps}"]
    found += [] if rate is None else [f"learning_rate={rate:g}"]
    found += [] if flops is None else [f"budget.flops={flops}"]
    found += [LINE] if cell.method == "sdft" and cell.task == "translation" else []
    return [*found, *cell.overrides, f"seed={cell.seed}"]


def evaluation_overrides(place: Place, scale: Scale, cell: Cell, part: str) -> list[str]:
    """Overrides of evaluation.yaml, paths and all, to measure a cell on `part`: test, validation or long."""
    paths = [*_paths(place, cell.task, "train"), f"test_datasets.0.path={place.data(cell.task, part)}"]
    return [*paths, f"output_dir={place.output / 'evaluation'}", *evaluation_changes(scale, cell, part)]


def evaluation_changes(scale: Scale, cell: Cell, part: str) -> list[str]:
    """Overrides of evaluation.yaml that are no paths: `long` has one long rollout of each document."""
    task = cell.task
    found = [*_rows(task), *([f"test_datasets.0.type={RAW_ROWS}"] if task == "raw" else [])]
    found += [*precision(cell), *scale.methods.get("evaluation", ())]
    if part != "long":
        return found
    longest = scale.longest_rollout(task)
    found += [f"ebft.generate_max_len={longest}", "ebft.stride=100000"]
    return [*found, *(["ebft.context_length=64"] if task == "raw" and not scale.is_tiny else [])]


def precision(cell: Cell) -> list[str]:
    """The override of a cell's data type, in every config of it."""
    return [FLOAT32] if cell.is_float32 else []


def _paths(place: Place, task: str, part: str) -> list[str]:
    return [f"base_model={place.base_model}", f"datasets.0.path={place.data(task, part)}"]


def _rows(task: str) -> list[str]:
    return [f"datasets.0.type={RAW_ROWS}"] if task == "raw" else []
