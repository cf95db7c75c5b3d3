"""The study's runs: methods by task, start and seed, EBFT's settings as one table of overrides, and their order.

Cells are run in the order of `all_cells`: what the main comparison needs first, further seeds and ablations later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatch

TASKS = ("functions", "translation", "raw")
STARTS = ("base", "warm")

# Settings of EBFT: what each changes in configs/ebft.yaml, whose settings are the paper's. `mean` was chosen by hand
# after a run of gradient_signal.py that is not stored: the policy gradient had the largest share of signal at 16
# documents a step, and the two terms of the loss gradients of like size.
MEAN = (
    "ebft.embed_method=mean_pooling",
    "ebft.whitening_space=feature",
    "ebft.temperature=1.0",
    "ebft.ce_coef=0.2",
)
SETTINGS = {
    "mean": MEAN,
    "paper": (),
    "mean ce 0": (*MEAN, "ebft.ce_coef=0"),
    "mean ce 0.03": (*MEAN, "ebft.ce_coef=0.03"),
    "mean ce 0.1": (*MEAN, "ebft.ce_coef=0.1"),
    "mean unwhitened": (*MEAN, "ebft.use_whitening=false"),
    "paper ce 0": ("ebft.ce_coef=0",),
    "paper ce 0.1": ("ebft.ce_coef=0.1",),
}
# By task the settings that run with every seed, beside SFT; the others run with the first seed alone.
MAIN_SETTINGS = {"functions": ("mean",), "translation": ("mean",), "raw": ("mean",)}


@dataclass(frozen=True)
class Cell:
    """One model to train and measure. Method `none` is the start itself, `sft_flops` is SFT with the FLOPs of EBFT."""

    task: str
    start: str
    method: str  # none, sft, sft_flops, rlvr, ebft, structured (EBFT on whole completions, over vLLM)
    seed: int = 0
    setting: str = ""
    overrides: tuple[str, ...] = ()
    measures: str = "task"  # what is measured: task, humaneval, or sweep (the validation part, for learning rates)

    @property
    def group(self) -> str:
        """The name that its seeds share."""
        parts = (self.task, self.start, self.method, self.setting.replace(" ", "_"))
        return "-".join(part for part in parts if part)

    @property
    def name(self) -> str:
        """A file name of its own."""
        return f"{self.model_name}-humaneval" if self.measures == "humaneval" else self.model_name

    @property
    def model_name(self) -> str:
        """The name of the trained model, which two cells with different measures share."""
        return f"{self.group}-seed{self.seed}"


def all_cells(seeds: Iterable[int]) -> list[Cell]:
    """Every cell in the order of running."""
    first, *more = seeds
    cells = [*main_cells("base", first), Cell("translation", "base", "structured", first), *humaneval_cells(first)]
    for seed in more:
        for task in TASKS:
            cells += [Cell(task, "base", "sft", seed)]
            cells += [ebft(task, "base", name, seed) for name in MAIN_SETTINGS[task]]
        cells += [Cell("functions", "base", "rlvr", seed), Cell("translation", "base", "structured", seed)]
    cells += [Cell(task, "base", "sft_flops", first) for task in TASKS]
    for task in TASKS:
        others = [name for name in SETTINGS if name not in MAIN_SETTINGS[task]]
        cells += [ebft(task, "base", name, first) for name in others]
    return [*cells, *main_cells("warm", first)]


def main_cells(start: str, seed: int) -> list[Cell]:
    """The main comparison with one seed: the start itself, SFT, the main settings of EBFT, and RLVR."""
    cells = []
    for task in TASKS:
        cells += [Cell(task, start, "none"), Cell(task, start, "sft", seed)]
        cells += [ebft(task, start, name, seed) for name in MAIN_SETTINGS[task]]
        cells += [Cell(task, start, "rlvr", seed)] if task == "functions" else []  # others have no verifier
    return cells


def humaneval_cells(seed: int) -> list[Cell]:
    """HumanEval, of models that other cells train."""
    cells = main_cells("base", seed)
    return [replace(cell, measures="humaneval") for cell in cells if cell.task == "functions"]


def ebft(task: str, start: str, setting: str, seed: int) -> Cell:
    """A cell of one of the settings."""
    return Cell(task, start, "ebft", seed, setting, SETTINGS[setting])


def chosen(cells: list[Cell], only: list[str], tasks: list[str]) -> list[Cell]:
    """The cells whose names match one of the patterns `only`, in the order of these, and of the given tasks.

    Raises ValueError for a pattern that no cell matches.
    """
    cells = [cell for cell in cells if not tasks or cell.task in tasks]
    if not only:
        return cells
    for pattern in only:
        if not any(fnmatch(cell.name, pattern) for cell in cells):
            raise ValueError(f"--only {pattern!r} matches no cell. Cells are: {', '.join(c.name for c in cells)}")
    matched = [cell for pattern in only for cell in cells if fnmatch(cell.name, pattern)]
    return list(dict.fromkeys(matched))


def needs(cell: Cell, other: Cell) -> bool:
    """Whether `cell` can only run once `other` is finished: it takes its model, or its FLOPs."""
    if cell.measures == "humaneval":
        return other.measures == "task" and other.model_name == cell.model_name
    return cell.method == "sft_flops" and other in flops_of(cell)


def flops_of(cell: Cell) -> tuple[Cell, Cell]:
    """The SFT and EBFT cells whose FLOPs give an `sft_flops` cell its steps."""
    return replace(cell, method="sft"), ebft(cell.task, cell.start, MAIN_SETTINGS[cell.task][0], cell.seed)
