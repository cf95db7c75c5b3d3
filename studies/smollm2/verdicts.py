"""Sentences and tables about claims, and the table of learning rates."""

from __future__ import annotations

from typing import Any

from claims import FAILS, HOLDS, MEAN, OPEN, judged
from metrics import columns
from sweep import OBJECTIVES
from tables import markdown, number

# What else a metric of the sentences responds to.
CAVEATS = {"cfm_loss_long": "text after an end token counts", "chrf_pass@1": "better where samples are more alike"}
OF_TASK = {"functions": "functions", "translation": "translation", "raw": "raw text"}


def sentences(cells: list[dict[str, Any]]) -> list[str]:
    """What holds, what does not, and what is undecided, a sentence each; and what EBFT costs beside SFT."""
    said: dict[str, dict[str, list[str]]] = {HOLDS: {}, FAILS: {}, OPEN: {}}
    for claim, task, start, metric, found, outcome in judged(cells):
        heading = columns(task)[metric].rstrip(" ↑↓")
        if outcome != OPEN and metric in CAVEATS:
            heading += f" ({CAVEATS[metric]})"
        shown = f" {number(found, signed=True)}" if outcome != OPEN else ""
        said[outcome].setdefault(claim.text, []).append(f"{where(task, start)}: {heading}{shown}")
    lists = {
        outcome: "; ".join(f"{text} ({', '.join(places)})" for text, places in found.items())
        for outcome, found in said.items()
    }
    return [
        f"**Holds:** {lists[HOLDS] or 'nothing so far'}.",
        f"**Does not hold:** {lists[FAILS] or 'nothing so far'}.",
        f"**Undecided:** {lists[OPEN] or 'nothing'}.",
    ]


def where(task: str, start: str) -> str:
    """A task and start in words."""
    return OF_TASK[task] + (" from a warm start" if start == "warm" else "")


def advice(cells: list[dict[str, Any]]) -> str:
    """What to take from it, by the trials against SFT and what both cost."""
    counts = dict.fromkeys((HOLDS, FAILS, OPEN), 0)
    places = {}
    for claim, task, start, *_, outcome in judged(cells):
        if claim.than == "sft":
            counts[outcome] += 1
            places[f"{task}-{start}"] = None
    ratios = sorted(flops(cells, f"{place}-{MEAN}") / flops(cells, f"{place}-sft") for place in places)
    if not ratios:
        return "**To take from it:** nothing yet."
    times = f"{ratios[0]:.1f}" if f"{ratios[0]:.1f}" == f"{ratios[-1]:.1f}" else f"{ratios[0]:.1f} to {ratios[-1]:.1f}"
    reason = "a reason to try it" if counts[HOLDS] > counts[FAILS] else "no reason to prefer it"
    return (
        f"**To take from it:** against SFT on as many documents, EBFT is better in {counts[HOLDS]} of "
        f"{sum(counts.values())} trials, worse in {counts[FAILS]} and undecided in {counts[OPEN]}, at {times} times "
        f"the FLOPs: {reason} at this size, rate and length of training."
    )


def flops(cells: list[dict[str, Any]], group: str) -> float:
    """Mean FLOPs of the runs of a group."""
    found = [cell["cost"]["flops"] for cell in cells if cell["cell"]["group"] == group]
    return sum(found) / len(found)


def claim_table(cells: list[dict[str, Any]]) -> str:
    """Each claim, tried in every task and from every start where both of its sides were run."""
    rows = []
    for claim, task, start, metric, found, said in judged(cells):
        outcome = said if said == OPEN else f"**{said}**"
        rows.append([claim.text, where(task, start), metric, number(found, signed=True), outcome])
    for above, row in zip(reversed(rows[:-1]), reversed(rows[1:])):
        if above[0] == row[0]:
            row[0] = ""
    return markdown(["claim", "task", "metric", "difference", "verdict"], rows)


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
