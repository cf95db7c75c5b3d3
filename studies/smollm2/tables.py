"""Markdown tables of stored results: the models of a task, differences from SFT and from the start, claims."""

from __future__ import annotations

import math
import statistics
from typing import Any

from cells import FACTORS, STARTS, TASKS
from claims import FAILS, HOLDS, OPEN, ROUNDING, judged
from intervals import Estimate, difference, is_start, over_seeds
from metrics import COLUMNS
from sweep import OBJECTIVES

COSTS = {
    "learning_rate": "learning rate",
    "steps": "steps",
    "documents": "documents",
    "generated_tokens": "generated tokens",
    "flops": "FLOPs",
}
# What the summary of the report compares EBFT's first setting with, and by which metrics.
HEADLINE_OTHERS = {
    "none": "the start",
    "sft": "SFT on as many documents",
    "sft_flops": "SFT at the same FLOPs",
    "rlvr": "RLVR on as many documents",
}
HEADLINE_METRICS = {
    "ce_loss": "cross-entropy",
    "cfm_loss": "CFM loss",
    "alignment": "alignment",
    "diversity": "diversity",
    "parses_pass@1": "parses",
}
METHODS = ("none", "sft", "sft_flops", "rlvr", *(f"ebft-{name.replace(' ', '_')}" for name in FACTORS))


def model_table(cells: list[dict[str, Any]], task: str, start: str) -> str:
    """One row for each method and setting: metrics as mean ± half width over seeds and files."""
    columns = COLUMNS[task]
    rows = []
    for group in groups_of(cells, task, start):
        rows.append([label(group), *(number(over_seeds(cells, group, metric)) for metric in columns)])
    return markdown(["model", *columns.values()], rows)


def cost_table(cells: list[dict[str, Any]], task: str, start: str) -> str:
    """What training cost, by method and setting."""
    groups = [group for group in groups_of(cells, task, start) if not is_start(group)]
    return markdown(["model", *COSTS.values()], [[label(group), *costs(cells, group)] for group in groups])


def difference_table(cells: list[dict[str, Any]], task: str, start: str, other: str) -> str:
    """How much every method is above the group `other` of the same start, paired by seed."""
    columns = COLUMNS[task]
    reference = f"{task}-{start}-{other}"
    rows = [
        [label(group), *(number(difference(cells, group, reference, metric), signed=True) for metric in columns)]
        for group in groups_of(cells, task, start)
        if group != reference and not is_start(group)
    ]
    return markdown([f"model − {label(reference)}", *columns.values()], rows)


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
    said = {claim.text: [] for claim, *_ in judged(cells)}
    for claim, *_, outcome in judged(cells):
        said[claim.text].append(outcome)
    rows = [
        [text, *(str(found.count(outcome) or "") for outcome in (HOLDS, FAILS, OPEN))] for text, found in said.items()
    ]
    return markdown(["claim", HOLDS, FAILS, OPEN], rows)


def sweep_table(found: dict[str, Any]) -> str:
    """What each learning rate gave: objective, cross-entropy and feature-matching loss; the chosen one in bold."""
    rates = sorted({rate for by_rate in found["tried"].values() for rate in by_rate}, key=float)
    rows = []
    for place, by_rate in found["tried"].items():
        task, start, method = place.split("-")
        best = found["chosen"].get(place)
        shown = {rate: " / ".join(f"{value:.3f}" for value in values.values()) for rate, values in by_rate.items()}
        bold = [f"**{shown[rate]}**" if float(rate) == best else shown.get(rate, "") for rate in rates]
        rows.append([f"{task}, {start}", method.upper(), OBJECTIVES[method], *bold])
    return markdown(["task, start", "method", "objective ↑", *rates], rows)


def sweep_edges(found: dict[str, Any]) -> list[str]:
    """Where the best learning rate is the lowest or the highest that was tried, so that a better one may lie beyond."""
    edges = []
    for place, values in found["tried"].items():
        rates = sorted(map(float, values))
        if found["chosen"].get(place) in (rates[0], rates[-1]):
            task, start, method = place.split("-")
            edges.append(f"{method.upper()} ({task}, {start}: {found['chosen'][place]:g})")
    return edges


def headlines(cells: list[dict[str, Any]]) -> list[str]:
    """One sentence for each main comparison and metric: where the difference is decided, and how large it is."""
    pairs = [(other, metric) for other in HEADLINE_OTHERS for metric in HEADLINE_METRICS]
    return [sentence for pair in pairs if (sentence := headline(cells, *pair)) is not None]


def diversity_of_starts(cells: list[dict[str, Any]]) -> str | None:
    """What a diversity above 1, the sign of mode collapse of the guide, is worth: that of models before any EBFT."""
    starts = [cell for cell in cells if cell["cell"]["method"] == "none" and "diversity" in cell["metrics"]]
    if not starts:
        return None
    values = {f"{cell['cell']['task']}, {cell['cell']['start']}": cell["metrics"]["diversity"] for cell in starts}
    listed = ", ".join(f"{value:.2f} ({place})" for place, value in values.items())
    above = [value > 1 for value in values.values()]
    said = "so that in some of them the sign misleads" if any(above) else "as it would have it"
    if all(above):
        said = "so a diversity above 1 is no sign of collapse in these features"
    return f"Guides take a diversity above 1 for mode collapse. Before any EBFT it is {listed}: {said}."


def headline(cells: list[dict[str, Any]], other: str, metric: str) -> str | None:
    """How EBFT's first setting differs from `other` in every task from every start; None where neither was run."""
    found = {}
    for place in (f"{task}-{start}" for task in TASKS for start in STARTS):
        value = difference(cells, f"{place}-ebft-centre", f"{place}-{other}", metric)
        if value is not None:
            found[place] = value
    if not found:
        return None
    decided = {place: value for place, value in found.items() if abs(value.mean) > value.half > ROUNDING}
    higher_is_better = COLUMNS["functions"][metric].endswith("↑")
    rated = lambda value: "better" if (value.mean > 0) == higher_is_better else "worse"
    parts = [f"{number(v, signed=True)}, {rated(v)} ({place.replace('-', ', ')})" for place, v in decided.items()]
    if len(decided) < len(found):
        parts.append(f"undecided in {len(found) - len(decided)} of {len(found)} settings")
    return f"EBFT − {HEADLINE_OTHERS[other]}, {HEADLINE_METRICS[metric]}: {'; '.join(parts)}."


def verdict_counts(cells: list[dict[str, Any]]) -> dict[str, int]:
    """How many trials of claims ended with each verdict."""
    counts: dict[str, int] = {}
    for *_, said in judged(cells):
        counts[said] = counts.get(said, 0) + 1
    return counts


def at_the_floor(cells: list[dict[str, Any]]) -> int:
    """How many trials compare rates that are 0 for every model on both sides."""
    return sum(found.half < ROUNDING and abs(found.mean) < ROUNDING for *_, found, _ in judged(cells))


def groups_of(cells: list[dict[str, Any]], task: str, start: str) -> list[str]:
    """The groups of a task and start that were run, in the order of the tables."""
    there = {cell["cell"]["group"] for cell in cells if (cell["cell"]["task"], cell["cell"]["start"]) == (task, start)}
    known = [f"{task}-{start}-{method}" for method in METHODS]
    return [group for group in known if group in there] + sorted(there - set(known))


def label(group: str) -> str:
    """A group as the tables name it."""
    _, start, method, *setting = group.split("-", 3)
    names = {"none": f"{start} itself", "sft": "SFT, as many documents", "sft_flops": "SFT, same FLOPs", "rlvr": "RLVR"}
    if method != "ebft":
        return names[method]
    return "EBFT" if setting == ["centre"] else f"EBFT, {setting[0].replace('_', ' ')}"


def costs(cells: list[dict[str, Any]], group: str) -> list[str]:
    """Means over seeds of what the runs of a group cost."""
    found = [cell for cell in cells if cell["cell"]["group"] == group and "cost" in cell]
    values = [[{**cell, **cell["cost"]}[name] for cell in found] for name in COSTS]
    means = [statistics.mean(known) if (known := [v for v in row if v is not None]) else None for row in values]
    return ["" if mean is None else f"{mean:.2e}" if mean >= 1e7 else f"{mean:,.6g}" for mean in means]


def number(found: Estimate | None, signed: bool = False) -> str:
    """`mean ± half width`, with as many decimals as the half width has two significant digits of."""
    if found is None:
        return ""
    sign = "+" if signed else ""
    if math.isnan(found.half) or found.half == 0:
        return f"{found.mean:{sign}.3f}"
    decimals = min(5, max(1, 1 - math.floor(math.log10(found.half))))
    if round(abs(found.mean), decimals) == round(found.half, decimals):
        decimals += 1  # to see which is larger
    mean = round(found.mean, decimals) + 0.0  # no -0.0
    return f"{mean:{sign}.{decimals}f} ± {found.half:.{decimals}f}"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    line = lambda entries: f"| {' | '.join(entries)} |"
    return "\n".join([line(header), line(["---"] * len(header)), *map(line, rows)])
