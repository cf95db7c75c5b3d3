"""From a cell to the config that trains it and the config that measures it: YAML files and overrides, nothing else."""

from pathlib import Path

import project
from cells import Cell
from sizes import Size

# A method's config file; the warm start is an SFT run.
CONFIG_OF = {
    "sft": "sft",
    "sft_flops": "sft",
    "ebft": "ebft",
    "rlvr": "rlvr",
    "evaluation": "evaluation",
    "base": "base",
}
RAW_ROWS = "ebft_pretrain.transform"


def config_file(method: str) -> Path:
    """The YAML file of a method."""
    return project.CONFIGS / f"{CONFIG_OF[method]}.yaml"


def start_folder(output: Path, task: str, start: str) -> Path:
    """Where the model lies that cells of a task start from."""
    return output / "base" if start == "base" else output / f"warm-{task}"


def base_overrides(output: Path, size: Size) -> list[str]:
    """Overrides of base.yaml."""
    paths = [f"base_model={output / 'init'}", f"datasets.0.path={output / 'data' / 'pretrain.jsonl'}"]
    return [*paths, f"output_dir={output / 'base'}", *size.methods.get("base", ())]


def warm_overrides(output: Path, size: Size, task: str) -> list[str]:
    """Overrides of sft.yaml for the warm start of a task."""
    folder = start_folder(output, task, "warm")
    return [*_training(output, size, "sft", task, "base", folder), *size.warm]


def cell_overrides(
    output: Path, size: Size, cell: Cell, steps: int | None = None, rate: float | None = None
) -> list[str]:
    """Overrides of the config of a cell's method: `steps` where another cell decides them, `rate` where a sweep did."""
    method, folder = CONFIG_OF[cell.method], output / "models" / cell.name
    found = _training(output, size, method, cell.task, cell.start, folder)
    found += [] if rate is None else [f"learning_rate={rate}"]
    found += [*cell.overrides, f"seed={cell.seed}"]
    return [*found, f"max_steps={steps}"] if steps is not None else found


def evaluation_overrides(output: Path, size: Size, task: str, part: str) -> list[str]:
    """Overrides of evaluation.yaml to measure on `part`, test or validation: raw text has no completions to verify."""
    found = [
        f"base_model={output / 'base'}",
        f"datasets.0.path={output / 'data' / f'{task}_train.jsonl'}",
        f"test_datasets.0.path={output / 'data' / f'{task}_{part}.jsonl'}",
        f"output_dir={output / 'evaluation'}",
        *size.overrides("evaluation", task),
    ]
    if task == "raw":
        found += [f"datasets.0.type={RAW_ROWS}", f"test_datasets.0.type={RAW_ROWS}", "evaluation.metrics=[]"]
    return [*found, *size.evaluation]


def _training(output: Path, size: Size, method: str, task: str, start: str, folder: Path) -> list[str]:
    """What all training runs of a task say: where from, on what, where to, and how large."""
    rows = [f"datasets.0.path={output / 'data' / f'{task}_train.jsonl'}"]
    rows += [f"datasets.0.type={RAW_ROWS}"] if task == "raw" else []
    paths = [f"base_model={start_folder(output, task, start)}", *rows, f"output_dir={folder}"]
    return [*paths, *size.overrides(method, task)]
