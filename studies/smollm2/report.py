"""The tables and the figure of docs/results.md, from results/: `python studies/smollm2/report.py`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from cells import parser_of, study_of
from intervals import Estimate, difference, is_start, over_seeds, seeds_of

TASKS = {"functions": "functions", "translation": "translation", "raw": "raw text"}
# Heading -> metrics, of which a task has one.
MAIN = {
    "cross-entropy": ("ce_loss",),
    "CFM loss, 8 tokens": ("cfm_loss",),
    "long¹": ("cfm_loss_long",),
    "completions, T = 1²": ("substance_pass@1", "chrf_pass@1"),
    "greedy²": ("substance_greedy", "chrf_greedy"),
}
OTHERS = {"alignment": ("alignment",), "diversity": ("diversity",), "distance of samples": ("pair_distance",)}
OTHERS |= {"distinct samples": ("distinct",), "FLOPs, times": ()}
LOWER_IS_BETTER = ("ce_loss", "cfm_loss", "cfm_loss_long")
Cells = list[dict[str, Any]]


def main() -> None:
    study = study_of(parser_of(__doc__).parse_args())
    cells = load_cells(study.results)
    print(main_table(cells))
    for name in ("ebft-mean", "sft"):
        print(f"\n{name} less other models, paired by seed and document; * marks one seed, and files alone:\n")
        print(difference_table(cells, name))
    if draw_overview(cells, study.results / "overview.png"):
        print(f"Drawn: {study.results / 'overview.png'}")


def load_cells(results: Path) -> Cells:
    """The stored runs, with `sums`, `weights` and `files` by metric: a value for each document.

    Raises ValueError for one that was measured on other documents than those of documents.json.
    """
    documents = json.loads((results / "documents.json").read_text(encoding="utf-8"))
    found = []
    for path in sorted(results.glob("cells/*.json")):
        cell = json.loads(path.read_text(encoding="utf-8"))
        if not cell["documents"].items() <= documents["made_from"].items():
            raise ValueError(f"{path} was measured on other documents than those of {results / 'documents.json'}")
        cell |= {"sums": {}, "weights": {}, "files": {}}
        for name, part in cell.pop("per_document").items():
            count, numbers, weights = len(part["sum"]), part["document"], part["weight"]
            numbers = numbers if isinstance(numbers, list) else range(count)
            cell["sums"][name] = part["sum"]
            cell["weights"][name] = weights if isinstance(weights, list) else [weights] * count
            sources = documents["sources"][cell["measured_on"][name]]
            cell["files"][name] = [sources[number] for number in numbers]
        found.append(cell)
    return found


def main_table(cells: Cells) -> str:
    """The start, SFT, EBFT and the difference of the two, by task."""
    rows = []
    for task, title in TASKS.items():
        sides = [f"{task}-base-{method}" for method in ("none", "sft", "ebft-mean")]
        for side, name in zip(sides, (f"{title}: pretrained model", "SFT", "EBFT")):
            found = [(next((e for one in of if (e := over_seeds(cells, side, one))), None), of) for of in MAIN.values()]
            shown = ["" if each is None else f"{each.mean:.{4 if 'cfm_loss' in of else 3}f}" for each, of in found]
            rows.append([name, *shown])
        rows.append(["EBFT - SFT", *differences(cells, sides[2], sides[1], MAIN)])
    return markdown(["", *MAIN], rows)


def difference_table(cells: Cells, name: str) -> str:
    """How much a method or setting is above every other one from the same task and start."""
    rows, columns = [], MAIN | OTHERS
    for group in sorted({cell["cell"]["group"] for cell in cells}):
        task, start, other = group.split("-", 2)
        ours = f"{task}-{start}-{name}"
        seeds = seeds_of(cells, ours) & (seeds_of(cells, ours if is_start(group) else group))
        if other != name and seeds:
            flops = lambda of, seeds=seeds: sum(
                cell["cost"]["flops"] for cell in cells if cell["cell"]["group"] == of and cell["cell"]["seed"] in seeds
            )
            ratio = "" if is_start(group) else f"{flops(ours) / flops(group):.2f}"
            rows.append([group, *differences(cells, ours, group, columns)[:-1], ratio])
    return markdown([f"{name}, less", *columns], rows)


def differences(cells: Cells, ours: str, theirs: str, columns: dict[str, tuple[str, ...]]) -> list[str]:
    """A difference for each column."""
    found = [[difference(cells, ours, theirs, metric) for metric in metrics] for metrics in columns.values()]
    return [number(next(filter(None, each), None)) for each in found]


def number(found: Estimate | None) -> str:
    """`mean ± half width` of a difference, with two digits of the half width; with one seed over files, and marked."""
    if found is None:
        return ""
    half, mark = (found.files, "*") if math.isnan(found.seeds) else (found.half, "")
    is_open = math.isnan(half) or half == 0
    decimals = 3 if is_open else min(5, max(1, 1 - math.floor(math.log10(half))))
    if not is_open and round(abs(found.mean), decimals) == round(half, decimals):
        decimals += 1  # to see which is larger
    shown = f"{round(found.mean, decimals) + 0.0:+.{decimals}f}"  # no -0.0
    return shown + mark if is_open else f"{shown} ± {half:.{decimals}f}{mark}"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(line.replace("|  |", "| |").replace("|  |", "| |") for line in lines)


def draw_overview(cells: Cells, path: Path) -> bool:
    """EBFT, mean, less SFT with 95% intervals, by metric and place; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    places = sorted({(one["cell"]["task"], one["cell"]["start"]) for one in cells if one["cell"]["method"] == "ebft"})
    figure, titles = Figure(figsize=(14, 0.9 + 0.55 * len(places)), layout="constrained"), []
    axes = figure.subplots(1, len(MAIN), sharey=True)
    for row, (task, start) in enumerate(places):
        sides = [f"{task}-{start}-{method}" for method in ("ebft-mean", "sft")]
        title = TASKS[task] + (" from a warm start" if start == "warm" else "")
        titles.append(f"{title}\n{len(seeds_of(cells, sides[0]))} seeds")
        for axis, metrics in zip(axes, MAIN.values()):
            for metric in metrics:
                found = difference(cells, *sides, metric)
                if found is None:
                    continue
                half = found.files if found.count == 1 else found.half
                is_better = (found.mean < 0) == (metric in LOWER_IS_BETTER)
                is_open = found.count == 1 or abs(found.mean) <= half
                color = "0.5" if is_open else "tab:green" if is_better else "tab:red"
                axis.errorbar(found.mean, row, xerr=half, fmt="D" if found.count == 1 else "o", color=color, capsize=3)
    for axis, title in zip(axes, MAIN):
        axis.axvline(0, color="0.3", linewidth=0.8)
        axis.set(yticks=range(len(titles)), yticklabels=titles, title=title.strip("¹²"), xlabel="EBFT - SFT")
        axis.margins(y=0.3)
        axis.grid(alpha=0.3)
    figure.suptitle("Green: EBFT better, red: worse, grey: undecided (diamonds: one seed)", fontsize=10)
    figure.savefig(path, dpi=90, metadata={"Software": None})
    return True


if __name__ == "__main__":
    main()
