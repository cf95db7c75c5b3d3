"""What the paper and the guide say, and what the intervals of this study say to it. No verdict is written by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from intervals import Estimate, difference, over_seeds

HOLDS, FAILS, OPEN = "holds", "does not hold", "not decided"
MARGIN = 0.05  # a rate lower by no more than this is called as high
ROUNDING = 1e-9  # a half width below it is none

DOWNSTREAM = ("substance_pass@1", "chrf_greedy", "chrf_pass@1")
PAPER, MEAN = "ebft-paper", "ebft-mean"


@dataclass(frozen=True)
class Claim:
    """That a metric of the cells `method` is higher or lower than, or no lower than, that of the cells `than`."""

    text: str
    source: str
    method: str  # of a group's name, what follows task and start
    than: str
    relation: str  # higher, lower, as high
    metrics: tuple[str, ...]

    def places(self, cells: list[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
        """Task, start and metric wherever both sides were run."""
        groups = {cell["cell"]["group"]: cell["cell"] for cell in cells}
        for group, cell in groups.items():
            place = f"{cell['task']}-{cell['start']}"
            if group == f"{place}-{self.method}" and f"{place}-{self.than}" in groups:
                for metric in self.metrics:
                    yield cell["task"], cell["start"], metric


def _about(method: str, name: str) -> tuple[Claim, ...]:
    """The paper's claims, of one setting of EBFT."""
    return (
        Claim(
            f"{name} does better downstream than SFT on as many documents", "paper", method, "sft", "higher", DOWNSTREAM
        ),
        Claim(
            f"{name} does better downstream than SFT at the same FLOPs",
            "paper",
            method,
            "sft_flops",
            "higher",
            DOWNSTREAM,
        ),
        Claim(
            f"{name} does as well downstream as RLVR on as many documents",
            "paper",
            method,
            "rlvr",
            "as high",
            DOWNSTREAM,
        ),
        Claim(
            f"{name} has a lower cross-entropy than SFT on as many documents",
            "paper",
            method,
            "sft",
            "lower",
            ("ce_loss",),
        ),
        Claim(f"{name} has a lower cross-entropy than RLVR", "paper", method, "rlvr", "lower", ("ce_loss",)),
        Claim(
            f"{name} lowers the feature-matching loss", "paper", method, "none", "lower", ("cfm_loss", "cfm_loss_long")
        ),
        Claim(
            f"{name} lowers it further than SFT on as many documents", "paper", method, "sft", "lower", ("cfm_loss",)
        ),
        Claim(f"{name} has a lower one than SFT on long rollouts", "paper", method, "sft", "lower", ("cfm_loss_long",)),
    )


CLAIMS = (
    *_about(MEAN, "EBFT, mean,"),
    *_about(PAPER, "EBFT, paper,"),
    Claim("RLVR raises the cross-entropy", "paper", "rlvr", "none", "higher", ("ce_loss",)),
    Claim(
        "A little cross-entropy (ce_coef 0.03) keeps the policy near the data",
        "guide",
        f"{MEAN}_ce_0.03",
        f"{MEAN}_ce_0",
        "lower",
        ("ce_loss",),
    ),
    Claim("More of it (ce_coef 0.2) keeps it nearer", "guide", MEAN, f"{MEAN}_ce_0.03", "lower", ("ce_loss",)),
    Claim(
        "Whitening helps (CFM is measured unwhitened, which favours training so)",
        "guide",
        MEAN,
        f"{MEAN}_unwhitened",
        "lower",
        ("cfm_loss", "ce_loss"),
    ),
)


def verdict(found: Estimate | None, relation: str, level: float = math.inf, margin: float = MARGIN) -> str:
    """What an interval of the difference says: `holds` or `does not hold` only where all of it is on one side.

    `level` is the higher of the two sides' means: of rates below the margin none is lower by more than it.
    """
    if found is None or math.isnan(found.half) or found.half < ROUNDING:
        return OPEN  # one seed, or nothing that differs between any, such as a rate at its floor
    if relation == "as high":
        if level < margin:
            return OPEN
        return HOLDS if found.low >= -margin else FAILS if found.high < -margin else OPEN
    low, high = (found.low, found.high) if relation == "higher" else (-found.high, -found.low)
    return HOLDS if low > 0 else FAILS if high < 0 else OPEN


def judged(cells: list[dict[str, Any]]) -> Iterator[tuple[Claim, str, str, str, Estimate | None, str]]:
    """Each claim wherever it can be tried: claim, task, start, metric, difference, verdict."""
    for claim in CLAIMS:
        for task, start, metric in claim.places(cells):
            sides = [f"{task}-{start}-{method}" for method in (claim.method, claim.than)]
            found = difference(cells, *sides, metric)
            if found is not None:
                level = max(over_seeds(cells, side, metric).mean for side in sides)
                yield claim, task, start, metric, found, verdict(found, claim.relation, level)
