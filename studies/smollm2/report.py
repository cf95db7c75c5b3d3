"""README.md of the study, from results/ and report_text.py alone. What has no result yet is listed as missing."""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import curves
import report_text as text
import stored
import tables
import verdicts
from cells import STARTS, TASKS, Cell, all_cells
from intervals import difference, over_seeds, spread_of_seeds
from metrics import COMPLETIONS, FEATURES
from scale import Scale
from sweep import chosen_rate

Cells = list[dict[str, Any]]


def write_report(results: Path, readme: Path, scale: Scale) -> Path:
    """Write the report on the cells that have results; returns its path. Raises ValueError where there is none."""
    planned = {cell.name: cell for cell in all_cells()}
    found = [cell for cell in stored.load_cells(results) if cell["cell"]["name"] in planned]
    cells = [cell for cell in found if has_chosen_rate(cell, planned[cell["cell"]["name"]], results)]
    if not cells:
        others = len(list((results / stored.CELLS).glob("*.json")))
        there = f" ({others} are of other documents, cells or learning rates than those of today)" if others else ""
        raise ValueError(f"{results} has no results to report{there}. Run the study first.")
    titles = {f"{task}-{start}": verdicts.where(task, start) for task in TASKS for start in STARTS}
    parts = [
        text.TITLE,
        *picture(results / "overview.png", readme.parent, text.OVERVIEW, curves.draw_overview, cells, titles),
    ]
    found = notes(cells, results)
    parts += [text.ASKED, *verdicts.sentences(cells, found), verdicts.advice(cells)]
    parts += [tables.main_table(cells, verdicts.OF_TASK), text.LEVELS]
    parts += [text.RIVALS, rivals] if (rivals := verdicts.rival_table(cells)) else []
    parts += [text.head(scale)]
    parts += ["## Results", text.state(cells, list(planned)), text.documents(stored.read(results / "documents.json"))]
    parts += ["### Claims", text.CLAIMS, verdicts.claim_table(cells, found), "### Models", text.INTERVALS]
    for task in TASKS:
        for start in STARTS:
            if tables.groups_of(cells, task, start):
                parts += [f"#### {text.TASK_TITLES[task]}, from {text.START_TITLES[start]}"]
                parts += place_part(cells, task, start, results, readme.parent)
    parts += signal_part(results, readme.parent)
    parts += ["### Learning rates", *sweep_part(results)]
    readme.write_text("\n\n".join([*parts, text.TAIL]) + "\n", encoding="utf-8")
    return readme


def notes(cells: Cells, results: Path) -> dict[tuple[str, str], str]:
    """What other measurements say of a difference from SFT, by place and metric."""
    found: dict[tuple[str, str], list[str]] = {}
    for task in TASKS:
        long = verdicts.where(task, "base"), "cfm_loss_long"
        worse = [str(x) for x in tables.LENGTHS if is_higher(tables.length_differences(cells, task, "base").get(x, []))]
        ours, start = (over_seeds(cells, f"{task}-base-{name}", "cfm_loss_long") for name in ("ebft-mean", "none"))
        no_gain = ours is not None and start is not None and ours.mean >= start.mean
        found[long] = [text.START.format(start.mean)] if no_gain else []
        found[long] += [text.SHORTER.format(" or ".join(worse))] if worse else []
    after_end = stored.read(results / "after-end-functions.json")
    if after_end:
        ends = {name: list(model["cfm_loss_to_end"].values())[-1] for name, model in after_end["models"].items()}
        values = [next((end for name, end in ends.items() if part in name), None) for part in ("-sft-", "-ebft-mean-")]
        if None not in values:
            found["functions", "cfm_loss_long"].append(text.TO_END.format(*values))
    sampled = ("translation", "chrf_pass@1")
    wider = difference(
        by_application(cells, sampled[1]), "translation-base-ebft-mean", "translation-base-sft", sampled[1]
    )
    found[sampled] = [text.APPLICATIONS.format(wider.half)] if wider is not None and wider.count > 1 else []
    cooler = stored.read(results / "temperatures-translation.json")
    if cooler:
        by_name = {name.split("-")[2]: model for name, model in cooler["models"].items()}
        places = (("sft", "1.0"), ("sft", "0.9"), ("ebft", "1.0"))
        values = [by_name.get(name, {}).get(temperature, {}).get(sampled[1]) for name, temperature in places]
        found[sampled] += [text.COOLER.format(*values)] if None not in values else []
    return {place: "; ".join(parts) for place, parts in found.items() if parts}


def is_higher(values: list[float]) -> bool:
    """Whether all of the interval of a difference over three seeds or more is above 0."""
    return len(values) > 2 and statistics.mean(values) > spread_of_seeds(values)


def by_application(cells: Cells, metric: str) -> Cells:
    """Cells in which the documents of one application, instead of one file, are one draw."""
    return [
        {**cell, "files": {metric: [file.split("/")[0] for file in cell["files"][metric]]}}
        for cell in cells
        if metric in cell["files"]
    ]


def place_part(cells: Cells, task: str, start: str, results: Path, folder: Path) -> list[str]:
    """Tables, curves and samples of one task and start."""
    found = [tables.model_table(cells, task, start, FEATURES), tables.document_counts(cells, task, start, FEATURES)]
    if COMPLETIONS[task]:
        found += ["Full completions:", tables.model_table(cells, task, start, COMPLETIONS[task])]
        found += [tables.document_counts(cells, task, start, COMPLETIONS[task])]
    if task == "translation":
        found += [text.CORPUS, tables.corpus_table(cells, task, start)]
    found += [text.LENGTHS[task], tables.length_table(cells, task, start)]
    after_end = stored.read(results / f"after-end-{task}.json")
    found += [text.AFTER_END, tables.after_end_table(after_end["models"])] if after_end and start == "base" else []
    cooler = stored.read(results / f"temperatures-{task}.json")
    found += [text.TEMPERATURES, tables.temperature_table(cooler["models"])] if cooler and start == "base" else []
    path = results / f"{task}-{start}-rollouts.png"
    found += picture(path, folder, f"rollouts of {task} from {start}", curves.draw_rollouts, cells, task, start)
    if f"{task}-{start}-sft" in tables.groups_of(cells, task, start):
        found += [tables.difference_table(cells, task, start, FEATURES | COMPLETIONS[task])]
        found += [without_copies(cells, start, results)] if task == "raw" else []
    found += [text.COSTS, tables.cost_table(cells, task, start)]
    if any(cell.get("phases") for cell in cells if (cell["cell"]["task"], cell["cell"]["start"]) == (task, start)):
        found += [text.PHASES, tables.phase_table(cells)]
    return [part for part in (*found, *samples(cells, task, start)) if part]


def without_copies(cells: Cells, start: str, results: Path) -> str:
    """The differences in cross-entropy on pieces of raw text that are no near copies of training; empty without any."""
    copies = stored.read(results / "documents.json").get("near_copies", [])
    metric, kept = "ce_loss", []
    for cell in cells:
        if cell["cell"]["task"] == "raw" and metric in cell["sums"]:
            values = {key: list(cell[key][metric]) for key in ("sums", "weights")}
            for number in copies:
                values["sums"][number] = values["weights"][number] = 0.0
            kept.append({**cell, **{key: {metric: value} for key, value in values.items()}})
    groups = [f"raw-{start}-{method}" for method in ("ebft-mean", "sft", "none")]
    ours, sft = (tables.number(difference(kept, *pair, metric), signed=True) for pair in zip(groups, groups[1:]))
    return text.NEAR_COPIES.format(count=len(copies), ours=ours, sft=sft) if copies and ours and sft else ""


def signal_part(results: Path, folder: Path) -> list[str]:
    """Where the gradients of the rewards point, of each task that was measured."""
    parts = []
    for task in TASKS:
        found = stored.read(results / f"gradient-signal-{task}-1.json")
        if found:
            path = results / f"gradient-signal-{task}.png"
            parts += picture(path, folder, f"gradients of {task}", curves.draw_signal, found)
            counts = [f"{of['train']} and {of['test']} with {length} tokens" for length, of in found["rows"].items()]
            listed = f"of training and test rows, {', '.join(counts)} are left"
            parts += [text.SIGNAL.format(**found, rows_of_lengths=listed), tables.signal_table(found)]
    return ["### Where the reward's gradient points", *parts] if parts else []


def picture(path: Path, folder: Path, title: str, draw: Any, *arguments: Any) -> list[str]:
    """A picture of the results, drawn anew, as a line of the report."""
    return [f"![{title}]({Path(os.path.relpath(path, folder)).as_posix()})"] if draw(*arguments, path) else []


def samples(cells: Cells, task: str, start: str) -> list[str]:
    """The greedy completion of one document by every model, beside the reference."""
    shown = {}
    for group in tables.groups_of(cells, task, start):
        of_group = [cell for cell in tables.of_group(cells, group) if "shown" in cell]
        if of_group:
            shown[tables.label(group)] = min(of_group, key=lambda cell: cell["cell"]["seed"])["shown"]
    if not shown:
        return []
    parts = ["<details><summary>Completions of a test prompt</summary>"]
    for number, example in enumerate(next(iter(shown.values()))[:1]):
        parts += [text.fenced("prompt", example["input"]), text.fenced("reference", example["output"])]
        for name, completions in shown.items():
            parts.append(text.fenced(f"{name}, greedy", completions[number]["greedy"]))
    return [*parts, "</details>"]


def has_chosen_rate(result: dict[str, Any], cell: Cell, results: Path) -> bool:
    """Whether a cell was trained at the learning rate that is chosen for it now; others count as missing."""
    rate = chosen_rate(results, cell)
    return rate is None or result.get("learning_rate", rate) == rate


def sweep_part(results: Path) -> list[str]:
    """How the learning rates were chosen."""
    found = stored.read(results / "sweep.json")
    if found is None:
        return [text.NO_SWEEP]
    edges = verdicts.sweep_edges(found)
    parts = [text.SWEEP.format(**found), verdicts.sweep_table(found)]
    parts += [text.EDGES.format(", ".join(edges)) if edges else text.NO_EDGES]
    by_hand = [f"- {place}: {rate:g}, {reason}" for place, (rate, reason) in found["by_hand"].items()]
    return [*parts, *([text.BY_HAND, "\n".join(by_hand)] if by_hand else [])]
