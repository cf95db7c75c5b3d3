"""README.md of the study, from results/*.json and report_text.py alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import curves
import report_text as text
import settings
import stored
import tables
from cells import STARTS, TASKS
from corpus import PARTS
from sizes import SIZES
from sweep import rate_place


def write_report(results: Path, readme: Path) -> Path:
    """Write the report on every size that has results; returns its path. Raises ValueError where there is none."""
    found = [stored.load(results, name) for name in SIZES]
    sections = [section(result, results, readme.parent) for result in found if result is not None]
    if not sections:
        raise ValueError(f"{results} has no results to report. Run the study first: {text.COMMANDS['small']}")
    readme.write_text("\n\n".join([text.head(PARTS["pretrain"]), *sections, text.TAIL]) + "\n", encoding="utf-8")
    return readme


def section(result: dict[str, Any], results: Path, folder: Path) -> str:
    """What one size found."""
    cells = result["cells"]
    parts = [f"## Results, size {result['size']}", text.machine_text(result), scale(result)]
    parts += [text.counts(tables.verdict_counts(cells), tables.at_the_floor(cells))]
    parts += ["### In short", text.IN_SHORT, "\n".join(f"- {line}" for line in summary_lines(cells))]
    parts += ["### Claims", text.CLAIMS, "In how many trials:", tables.summary_table(cells)]
    parts += ["Each trial:", tables.claim_table(cells)]
    parts += ["### Models", text.INTERVALS.format(samples=cells[0]["samples"])]
    for task in TASKS:
        for start in STARTS:
            if tables.groups_of(cells, task, start):
                parts += [
                    f"#### {text.TASK_TITLES[task]}, from {text.START_TITLES[start]}",
                    text.documents(result, task),
                ]
                parts += part(result, task, start, results, folder)
    parts += sweep_part(stored.load_sweep(results, result["size"]), result)
    if result["failed"]:
        parts += ["### What failed", *(f"- `{name}`: {error}" for name, error in result["failed"].items())]
    return "\n\n".join(parts)


def scale(result: dict[str, Any]) -> str:
    """How large the model and its runs were."""
    from ebft import load_config

    size = SIZES[result["size"]]
    base = load_config(settings.config_file("base"), list(size.methods.get("base", ())))
    return text.scale(size, base.max_steps, {cell["cell"]["seed"] for cell in result["cells"]})


def summary_lines(cells: list[dict[str, Any]]) -> list[str]:
    """Main comparisons, and what is to be said of the guide's advice, a sentence each."""
    advice = tables.diversity_of_starts(cells)
    return [*tables.headlines(cells), *([] if advice is None else [advice])]


def part(result: dict[str, Any], task: str, start: str, results: Path, folder: Path) -> list[str]:
    """Tables and curves of one task and start."""
    cells = result["cells"]
    found = [tables.model_table(cells, task, start), "What training cost:", tables.cost_table(cells, task, start)]
    for other in ("sft", "none"):
        if f"{task}-{start}-{other}" in tables.groups_of(cells, task, start):
            found.append(tables.difference_table(cells, task, start, other))
    pictures = {"Training curves": ("", curves.draw), "Rollouts": ("-rollouts", curves.draw_rollouts)}
    for title, (ending, draw) in pictures.items():
        picture = results / f"{result['size']}-{task}-{start}{ending}.png"
        if draw(cells, task, start, picture):
            found.append(f"![{title}]({Path(os.path.relpath(picture, folder)).as_posix()})")
    return found


def sweep_part(found: dict[str, Any] | None, result: dict[str, Any]) -> list[str]:
    """How the learning rates of the results were chosen. Raises ValueError where a later sweep chose others."""
    if found is None:
        return ["### Learning rates", text.NO_SWEEP]
    for cell in result["cells"]:
        place = rate_place(cell["cell"]["task"], cell["cell"]["start"], cell["cell"]["method"])
        if "learning_rate" in cell and cell["learning_rate"] != found["chosen"].get(place, cell["learning_rate"]):
            raise ValueError(
                f"{cell['cell']['name']} was not trained at the learning rate that {found['command']} chose. Run the "
                f"study again: {result['command']}"
            )
    edges = tables.sweep_edges(found)
    line = text.EDGES.format(", ".join(edges)) if edges else text.NO_EDGES
    return ["### Learning rates", text.sweep_text(found), tables.sweep_table(found), line]
