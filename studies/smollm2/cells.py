"""The study's runs as one table in the order of running, and EBFT's settings as a table of overrides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatch

TASKS = ("functions", "translation", "raw")
STARTS = ("base", "warm")

# Settings of EBFT: what each changes in configs/ebft.yaml, whose settings are the paper's. `mean` was chosen by hand
# after a measurement of gradients that is not stored: the policy gradient had the largest share of signal at 16
# documents a step, and the two terms of the loss gradients of like size.
MEAN = (
    "ebft.embed_method=mean_pooling",
    "ebft.whitening_space=feature",
    "ebft.temperature=1.0",
    "ebft.ce_coef=0.2",
)
SETTINGS = {"mean": MEAN, "paper": (), "mean ce 0": (*MEAN, "ebft.ce_coef=0")}

# Task, start, methods (of EBFT with the setting), seeds: the methods of a line run with its first seed, then the next.
# Three seeds where SFT and EBFT are compared in full completions, two on raw text and from the warm start, one where a
# difference of the size of other effects is enough to see. SFT at the FLOPs of EBFT, and self-distillation, which
# samples and needs no verifier as EBFT does, take those of their own seed, or of these a share.
PLAN = (
    ("raw", "base", ("none",), (0,)),
    ("raw", "base", ("sft", "ebft mean"), (0, 1)),
    ("translation", "base", ("none",), (0,)),
    ("translation", "base", ("sft", "ebft mean", "structured"), (0, 1, 2)),
    ("translation", "base", ("sft_flops",), (2,)),
    ("translation", "base", ("sdft",), (0,)),
    ("translation", "warm", ("none",), (0,)),
    ("translation", "warm", ("sft", "ebft mean"), (0, 1)),
    ("raw", "base", ("ebft paper",), (0,)),
    ("translation", "base", ("ebft paper", "ebft mean ce 0"), (0,)),
    ("functions", "base", ("none",), (0,)),
    ("functions", "base", ("sft", "ebft mean"), (0, 1, 2)),
    ("functions", "base", ("sft_flops", "rlvr", "ebft mean ce 0", "sdft"), (0,)),
)

# Of the FLOPs of EBFT, where not all: with half of them, self-distillation on functions has more than SFT on as many
# documents, and all of them take 42 steps of three to four minutes.
SHARES = {"functions-base-sdft": 0.5}

# In float32: runs planned for processors without bfloat16 instructions, where bfloat16 takes ten times as long.
FLOAT32 = ("raw-*", "*-warm-*", "translation-base-sft_flops-*", "*-sdft-*", "*-ebft-paper-*")


@dataclass(frozen=True)
class Cell:
    """One model to train and measure. Method `none` is the start itself, `sft_flops` is SFT with the FLOPs of EBFT."""

    task: str
    start: str
    method: str  # none, sft, sft_flops, sdft, rlvr, ebft, structured (EBFT on whole completions, over vLLM)
    seed: int = 0
    setting: str = ""
    overrides: tuple[str, ...] = ()
    measures: str = "task"  # what is measured: task, or sweep (the validation part, for learning rates)

    @property
    def group(self) -> str:
        """The name that its seeds share."""
        parts = (self.task, self.start, self.method, self.setting.replace(" ", "_"))
        return "-".join(part for part in parts if part)

    @property
    def name(self) -> str:
        """A file name of its own."""
        return f"{self.group}-seed{self.seed}"

    @property
    def is_float32(self) -> bool:
        """Whether the model's weights are float32 instead of bfloat16, in training and measuring."""
        return any(fnmatch(self.name, pattern) for pattern in FLOAT32)


def all_cells() -> list[Cell]:
    """Every cell of the plan, in the order of running."""
    return [
        planned(task, start, method, seed)
        for task, start, methods, seeds in PLAN
        for seed in seeds
        for method in methods
    ]


def planned(task: str, start: str, method: str, seed: int) -> Cell:
    """The cell of a method as the plan names it."""
    name, _, setting = method.partition(" ")
    return Cell(task, start, name, seed, setting, SETTINGS[setting] if setting else ())


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
    """Whether `cell` can only run once `other` is finished, whose FLOPs it takes."""
    return other in flops_of(cell)


def flops_of(cell: Cell) -> tuple[Cell, ...]:
    """The EBFT cell whose FLOPs a cell takes, if it does, and before it the SFT cell that says those of a step."""
    ebft = planned(cell.task, cell.start, "ebft mean", cell.seed)
    return {"sft_flops": (replace(cell, method="sft"), ebft), "sdft": (ebft,)}.get(cell.method, ())
