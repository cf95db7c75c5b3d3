"""The study's runs: around one EBFT setting, that of configs/ebft.yaml, each factor is varied alone.

The centre is unwhitened because the loss that every model is measured by is, with the authors' weights for diversity
(0.5) and cross-entropy (0.03). All combinations of the factors would be 18 EBFT runs for each start and seed; these
are 6.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

TASKS = ("functions", "raw")
STARTS = ("base", "warm")

CENTRE = "centre"
FACTORS = {
    CENTRE: (),
    "ce_coef 0": ("ebft.ce_coef=0",),
    "ce_coef 0.1": ("ebft.ce_coef=0.1",),
    "whitening": ("ebft.use_whitening=true",),
    "diversity 0": ("ebft.diversity_coef=0",),
    "diversity 1": ("ebft.diversity_coef=1",),
}
# What the guide states as facts, tried on functions from the base model.
ABLATIONS = {
    "last_token": ("ebft.embed_method=last_token",),
    "temperature 0.6": ("ebft.temperature=0.6",),
    "rloo_baseline mean": ("ebft.rloo_baseline=mean",),
}


@dataclass(frozen=True)
class Cell:
    """One model to train and measure. Method `none` is the start itself, `sft_flops` is SFT with the FLOPs of EBFT."""

    task: str
    start: str
    method: str  # none, sft, sft_flops, rlvr, ebft
    seed: int = 0
    setting: str = ""
    overrides: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """The name that its seeds share."""
        parts = (self.task, self.start, self.method, self.setting.replace(" ", "_"))
        return "-".join(part for part in parts if part)

    @property
    def name(self) -> str:
        """A file name of its own."""
        return f"{self.group}-seed{self.seed}"


def all_cells(seeds: Iterable[int], settings: Container[str] | None = None) -> list[Cell]:
    """Every cell in the order of running, starts first; `settings` limits those of EBFT (None is all)."""
    wanted = lambda table: {name: keys for name, keys in table.items() if settings is None or name in settings}
    cells = [Cell(task, start, "none") for task in TASKS for start in STARTS]
    for seed in seeds:
        for task in TASKS:
            for start in STARTS:
                cells += [Cell(task, start, "ebft", seed, name, keys) for name, keys in wanted(FACTORS).items()]
                cells += [Cell(task, start, "sft", seed), Cell(task, start, "sft_flops", seed)]
                # Raw text has no verifier.
                cells += [Cell(task, start, "rlvr", seed)] if task == "functions" else []
        cells += [Cell("functions", "base", "ebft", seed, name, keys) for name, keys in wanted(ABLATIONS).items()]
    return cells


def waits_for_others(cell: Cell) -> bool:
    """Whether the number of its steps follows from runs of other cells."""
    return cell.method == "sft_flops"
