"""Sentences and tables about claims, and the table of learning rates."""

from __future__ import annotations

import math
from typing import Any

from claims import FAILS, HOLDS, MEAN, OPEN, ROUNDING, judged
from intervals import Estimate, by_seed, difference
from metrics import MAIN, columns
from sweep import OBJECTIVES
from tables import label, markdown, number, precision_mark, seeds_of

RIVALS = ("sft_flops", "sdft", "rlvr", "structured", "ebft-paper")
OF_TASK = {"functions": "functions", "translation": "translation", "raw": "raw text"}


def sentences(cells: list[dict[str, Any]], notes: dict[tuple[str, str], str]) -> list[str]:
    """Where EBFT is better than SFT, where worse, and where undecided, a sentence each.

    `notes`: by (place, metric) what else is known of a difference that speaks for EBFT, or is undecided.
    """
    said: dict[str, list[str]] = {HOLDS: [], FAILS: [], OPEN: [], "one seed": []}
    wide: dict[str, list[str]] = {}
    for claim, task, start, metric, found, outcome in judged(cells):
        if claim.than != "sft":
            continue
        heading, place = columns(task)[metric].rstrip(" ↑↓"), where(task, start)
        shown = f"{place}, {heading} {number(found, signed=True)}"
        note = f" ({notes[place, metric]})" if (place, metric) in notes else ""
        if found.count == 1:
            said["one seed"].append(shown)
        elif outcome == OPEN:
            change = difference(cells, f"{task}-{start}-sft", f"{task}-{start}-none", metric)
            if change is not None and found.half > abs(change.mean) / 2:
                wide.setdefault(f"{place} ({found.count} seeds)", []).append(heading)
            else:
                said[OPEN].append(f"{place} ({found.count} seeds), {heading} {interval(found)}{note}")
        else:
            said[outcome].append(shown + (note if outcome == HOLDS else ""))
    count = sum(map(len, (*said.values(), *wide.values())))
    too_wide = "; ".join(f"{place}: {' / '.join(headings)}" for place, headings in wide.items())
    lines = [
        f"**Better than SFT:** {'; '.join(said[HOLDS]) or 'nothing so far'}.",
        f"**Worse:** {'; '.join(said[FAILS]) or 'nothing so far'}.",
        f"**Undecided**, with intervals of 95% of EBFT less SFT: {'; '.join(said[OPEN]) or 'nothing'}. Too wide to "
        f"tell (more than half of what SFT itself changes, to either side): {too_wide or 'nothing'}. No interval is "
        f"corrected for the number of comparisons, {count}.",
    ]
    if said["one seed"]:
        lines[-1] += f" With one seed: {'; '.join(said['one seed'])}."
    return lines


def interval(found: Estimate) -> str:
    """What an interval that decides nothing leaves possible."""
    if math.isnan(found.half) or found.half < ROUNDING:
        return f"{number(found, signed=True)}"
    decimals = max(1, 1 - math.floor(math.log10(found.half)))
    return f"{found.low:+.{decimals}f} to {found.high:+.{decimals}f}"


def where(task: str, start: str) -> str:
    """A task and start in words."""
    return OF_TASK[task] + (" from a warm start" if start == "warm" else "")


def advice(cells: list[dict[str, Any]]) -> str:
    """What to take from it, by the trials against SFT and what both cost."""
    found: dict[str, set[str]] = {HOLDS: set(), FAILS: set(), OPEN: set()}
    for claim, task, start, _, compared, outcome in judged(cells):
        if claim.than == "sft" and compared.count > 1:
            found[outcome].add(f"{task}-{start}")
    places = set.union(*found.values())
    ratios = sorted(flops(cells, f"{place}-{MEAN}") / flops(cells, f"{place}-sft") for place in places)
    if not ratios:
        return "**To take from it:** nothing yet."
    times = f"{ratios[0]:.1f}" if f"{ratios[0]:.1f}" == f"{ratios[-1]:.1f}" else f"{ratios[0]:.1f} to {ratios[-1]:.1f}"
    is_better = found[HOLDS] - found[FAILS]
    reason = "a reason to try it there" if is_better else "no reason to prefer it so far"
    return (
        f"**To take from it:** EBFT takes {times} times the FLOPs of SFT on as many documents. Its cross-entropy, "
        f"which is what SFT minimises, is higher in {pairs(cells, 'ce_loss')} pairs of runs, and its CFM loss of 8 "
        f"tokens in {pairs(cells, 'cfm_loss')}. In {len(is_better)} of {len(places)} places, it is better in something "
        f"and worse in nothing: {reason}, at this size, rate and length of training. What is undecided may still "
        "differ."
    )


def pairs(cells: list[dict[str, Any]], metric: str) -> str:
    """In how many of the pairs of runs with the same task, start and seed EBFT, mean, has more of a metric than SFT."""
    found = []
    for place in sorted({f"{cell['cell']['task']}-{cell['cell']['start']}" for cell in cells}):
        ours, theirs = (by_seed(cells, f"{place}-{method}", metric) for method in (MEAN, "sft"))
        found += [ours[seed].mean > theirs[seed].mean for seed in ours.keys() & theirs.keys()]
    return f"{sum(found)} of {len(found)}"


def rival_table(cells: list[dict[str, Any]]) -> str:
    """EBFT less each of its rivals but SFT on as many documents, and less its other settings; empty without any."""
    rows = []
    for rival in RIVALS:
        for group in sorted({cell["cell"]["group"] for cell in cells if cell["cell"]["group"].endswith(f"-{rival}")}):
            task, start, _ = group.split("-", 2)
            ours = f"{task}-{start}-{MEAN}"
            found = [[difference(cells, ours, group, metric) for metric in metrics] for metrics in MAIN.values()]
            values = [number(next(filter(None, of_metric), None), signed=True) for of_metric in found]
            if any(values):
                seeds = seeds_of(cells, group) & seeds_of(cells, ours)
                paired = [cell for cell in cells if cell["cell"]["seed"] in seeds]
                ratio = flops(paired, group) / flops(paired, ours)
                name = label(group) + precision_mark(cells, group, ours)
                rows.append([name, where(task, start), f"{ratio:.2f}", *values])
    return markdown(["EBFT, mean, less", "task", "its FLOPs / EBFT's", *MAIN], rows) if rows else ""


def flops(cells: list[dict[str, Any]], group: str) -> float:
    """Mean FLOPs of the runs of a group."""
    found = [cell["cost"]["flops"] for cell in cells if cell["cell"]["group"] == group]
    return sum(found) / len(found)


def claim_table(cells: list[dict[str, Any]], notes: dict[tuple[str, str], str]) -> str:
    """Each claim, tried in every task and from every start where both of its sides were run; `notes` as above."""
    rows = []
    for claim, task, start, metric, found, said in judged(cells):
        outcome = said if said == OPEN else f"**{said}**"
        if said == HOLDS and claim.than == "sft" and (where(task, start), metric) in notes:
            outcome += ", with the note above"
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
