"""What the paper says, and what the intervals of this study say to it. No verdict is written by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from intervals import Estimate, difference

HOLDS, FAILS, OPEN = "holds", "does not hold", "not decided"
ROUNDING = 1e-9  # a half width below it is none
MEAN = "ebft-mean"  # the setting with more than one seed, without which nothing is decided


@dataclass(frozen=True)
class Claim:
    """That a metric of the cells `of` is higher or lower than that of the cells `than`."""

    text: str
    than: str  # of a group's name, what follows task and start
    relation: str  # higher, lower
    metrics: tuple[str, ...]
    of: str = MEAN

    def places(self, cells: list[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
        """Task, start and metric wherever both sides were run."""
        groups = {cell["cell"]["group"]: cell["cell"] for cell in cells}
        for group, cell in groups.items():
            place = f"{cell['task']}-{cell['start']}"
            if group == f"{place}-{self.of}" and f"{place}-{self.than}" in groups:
                for metric in self.metrics:
                    yield cell["task"], cell["start"], metric


# Of the paper, Jelassi et al., and what SFT does to the same loss.
CLAIMS = (
    Claim("EBFT lowers the feature-matching loss", "none", "lower", ("cfm_loss", "cfm_loss_long")),
    Claim("SFT lowers it", "none", "lower", ("cfm_loss", "cfm_loss_long"), "sft"),
    Claim("EBFT lowers it further than SFT", "sft", "lower", ("cfm_loss",)),
    Claim("EBFT has a lower one than SFT on long rollouts", "sft", "lower", ("cfm_loss_long",)),
    Claim("EBFT has a lower cross-entropy than SFT", "sft", "lower", ("ce_loss",)),
    Claim(
        "EBFT does better downstream than SFT",
        "sft",
        "higher",
        ("substance_greedy", "substance_pass@1", "chrf_greedy", "chrf_pass@1"),
    ),
    Claim("EBFT's rollouts are closer to the text than SFT's", "sft", "higher", ("alignment",)),
    Claim("EBFT's rollouts are less alike than SFT's", "sft", "lower", ("diversity",)),
)


def verdict(found: Estimate | None, relation: str) -> str:
    """What an interval of the difference says: `holds` or `does not hold` only where all of it is on one side."""
    if found is None or math.isnan(found.half) or found.half < ROUNDING:
        return OPEN  # one seed, or nothing that differs between any, such as a rate at its floor
    low, high = (found.low, found.high) if relation == "higher" else (-found.high, -found.low)
    return HOLDS if low > 0 else FAILS if high < 0 else OPEN


def judged(cells: list[dict[str, Any]]) -> Iterator[tuple[Claim, str, str, str, Estimate, str]]:
    """Each claim wherever it can be tried: claim, task, start, metric, difference, verdict."""
    for claim in CLAIMS:
        for task, start, metric in claim.places(cells):
            sides = [f"{task}-{start}-{method}" for method in (claim.of, claim.than)]
            found = difference(cells, *sides, metric)
            if found is not None:
                yield claim, task, start, metric, found, verdict(found, claim.relation)
