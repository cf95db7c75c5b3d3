"""Tables and sentences about claims, main comparisons and learning rates."""

from __future__ import annotations

from typing import Any

from cells import STARTS, TASKS
from claims import FAILS, HOLDS, MEAN, OPEN, PAPER, ROUNDING, judged
from intervals import difference
from metrics import columns, is_better_higher
from sweep import OBJECTIVES
from tables import markdown, number

# What the summary of the report compares EBFT with, and by which metrics.
OTHERS = {
    "none": "the start",
    "sft": "SFT on as many documents",
    "sft_flops": "SFT at the same FLOPs",
    "rlvr": "RLVR on as many documents",
}
METRICS = (
    "ce_loss",
    "cfm_loss",
    "cfm_loss_long",
    "substance_pass@1",
    "chrf_greedy",
    "pair_distance",
)


def claim_table(cells: list[dict[str, Any]]) -> str:
    """Each claim, tried in every task and from every start where both of its sides were run."""
    rows = []
    for claim, task, start, metric, found, said in judged(cells):
        outcome = said if said == OPEN else f"**{said}**"
        rows.append([claim.text, claim.source, f"{task}, {start}", metric, number(found, signed=True), outcome])
    for above, row in zip(reversed(rows[:-1]), reversed(rows[1:])):
        if above[0] == row[0]:
            row[:2] = ["", ""]
    return markdown(["claim", "from", "task, start", "metric", "difference", "verdict"], rows)


def summary_table(cells: list[dict[str, Any]]) -> str:
    """In how many of its trials each claim holds."""
    said: dict[str, list[str]] = {}
    for claim, *_, outcome in judged(cells):
        said.setdefault(claim.text, []).append(outcome)
    rows = [
        [text, *(str(found.count(outcome) or "") for outcome in (HOLDS, FAILS, OPEN))] for text, found in said.items()
    ]
    return markdown(["claim", HOLDS, FAILS, OPEN], rows)


def verdict_counts(cells: list[dict[str, Any]]) -> dict[str, int]:
    """How many trials of claims ended with each verdict."""
    counts: dict[str, int] = {}
    for *_, said in judged(cells):
        counts[said] = counts.get(said, 0) + 1
    return counts


def headlines(cells: list[dict[str, Any]]) -> list[str]:
    """One sentence for each main comparison and metric: where the difference is decided, and how large it is."""
    triples = [(method, other, metric) for method in (MEAN, PAPER) for other in OTHERS for metric in METRICS]
    return [sentence for triple in triples if (sentence := headline(cells, *triple)) is not None]


def headline(cells: list[dict[str, Any]], method: str, other: str, metric: str) -> str | None:
    """How EBFT differs from `other` in every task from every start; None where no difference has an interval."""
    places = [(task, start) for task in TASKS for start in STARTS if metric in columns(task)]
    found = {}
    for task, start in places:
        value = difference(cells, f"{task}-{start}-{method}", f"{task}-{start}-{other}", metric)
        if value is not None and value.half == value.half:  # not NaN
            found[f"{task}, {start}"] = value
    if not found:
        return None
    decided = {place: value for place, value in found.items() if abs(value.mean) > value.half > ROUNDING}
    rated = lambda value: "better" if (value.mean > 0) == is_better_higher(metric) else "worse"
    parts = [f"{number(value, signed=True)}, {rated(value)} ({place})" for place, value in decided.items()]
    if len(decided) < len(found):
        parts.append(f"undecided in {len(found) - len(decided)} of {len(found)} settings")
    heading = columns(places[0][0])[metric].rstrip(" ↑↓")
    return f"EBFT, {method.removeprefix('ebft-')} − {OTHERS[other]}, {heading}: {'; '.join(parts)}."


def sweep_table(found: dict[str, Any]) -> str:
    """What each learning rate gave: objective, cross-entropy and feature-matching loss; the chosen one in bold."""
    rates = sorted({rate for by_rate in found["tried"].values() for rate in by_rate}, key=float)
    rows = []
    for place, by_rate in found["tried"].items():
        task, method, *family = place.split("-")
        best = found["chosen"].get(place)
        shown = {rate: " / ".join(f"{value:.3f}" for value in values.values()) for rate, values in by_rate.items()}
        bold = [f"**{shown[rate]}**" if float(rate) == best else shown.get(rate, "") for rate in rates]
        rows.append([task, " ".join([method.upper(), *family]), OBJECTIVES[method], *bold])
    return markdown(["task", "method", "objective ↑", *rates], rows)


def sweep_edges(found: dict[str, Any]) -> list[str]:
    """Where the best learning rate is the lowest or the highest that was tried, so that a better one may lie beyond."""
    edges = []
    for place, values in found["tried"].items():
        rates = sorted(map(float, values))
        if found["chosen"].get(place) in (rates[0], rates[-1]):
            edges.append(f"{place} ({found['chosen'][place]:g})")
    return edges
