"""What the paper and the guide say, and what the intervals of this study say to it. No verdict is written by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from intervals import Estimate, difference, over_seeds

HOLDS, FAILS, OPEN = "holds", "does not hold", "not decided at this size"
MARGIN = 0.05  # a rate lower by no more than this is called as high
ROUNDING = 1e-9  # a half width below it is none

DOWNSTREAM = ("parses_pass@1", "uses_names_pass@1", "passes_doctest_pass@1")
CENTRE = "ebft-centre"


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


CLAIMS = (
    Claim("EBFT does better downstream than SFT on as many documents", "paper", CENTRE, "sft", "higher", DOWNSTREAM),
    Claim("EBFT does better downstream than SFT at the same FLOPs", "paper", CENTRE, "sft_flops", "higher", DOWNSTREAM),
    Claim("EBFT does as well downstream as RLVR on as many documents", "paper", CENTRE, "rlvr", "as high", DOWNSTREAM),
    Claim(
        "EBFT has a lower cross-entropy than SFT on as many documents", "paper", CENTRE, "sft", "lower", ("ce_loss",)
    ),
    Claim(
        "EBFT has a lower cross-entropy than SFT at the same FLOPs", "paper", CENTRE, "sft_flops", "lower", ("ce_loss",)
    ),
    Claim(
        "EBFT has a lower cross-entropy than RLVR on as many documents", "paper", CENTRE, "rlvr", "lower", ("ce_loss",)
    ),
    Claim("EBFT lowers the feature-matching loss", "paper", CENTRE, "none", "lower", ("cfm_loss",)),
    Claim("EBFT lowers it further than SFT on as many documents", "paper", CENTRE, "sft", "lower", ("cfm_loss",)),
    Claim("EBFT lowers it further than SFT at the same FLOPs", "paper", CENTRE, "sft_flops", "lower", ("cfm_loss",)),
    Claim("RLVR raises the cross-entropy", "paper", "rlvr", "none", "higher", ("ce_loss",)),
    Claim(
        "A little cross-entropy (ce_coef 0.03) keeps the policy near the data",
        "guide",
        CENTRE,
        "ebft-ce_coef_0",
        "lower",
        ("ce_loss",),
    ),
    Claim("More of it (ce_coef 0.1) keeps it nearer", "guide", "ebft-ce_coef_0.1", CENTRE, "lower", ("ce_loss",)),
    Claim(
        "Whitening helps (CFM is measured unwhitened, which favours training without)",
        "guide",
        "ebft-whitening",
        CENTRE,
        "lower",
        ("cfm_loss", "ce_loss"),
    ),
    Claim(
        "The diversity penalty keeps samples apart (diversity_coef 1 against 0)",
        "guide",
        "ebft-diversity_1",
        "ebft-diversity_0",
        "lower",
        ("diversity",),
    ),
    Claim(
        "diversity_coef 1 lowers the feature-matching loss further than 0.5",
        "paper",
        "ebft-diversity_1",
        CENTRE,
        "lower",
        ("cfm_loss",),
    ),
    Claim(
        "last_token, the default, does better than mean_pooling (CFM is measured mean-pooled, which favours that)",
        "guide",
        "ebft-last_token",
        CENTRE,
        "lower",
        ("cfm_loss", "ce_loss"),
    ),
    Claim(
        "Temperature 0.6, the default, does better than 1 (CFM is measured at 1, which favours that)",
        "guide",
        "ebft-temperature_0.6",
        CENTRE,
        "lower",
        ("cfm_loss", "ce_loss"),
    ),
    Claim(
        "A leave-one-out baseline free of the sample itself keeps samples further apart than the plain mean",
        "rloo_baseline",
        CENTRE,
        "ebft-rloo_baseline_mean",
        "lower",
        ("diversity",),
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
