"""README.md of the study, from results/*.json and report_text.py alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import curves
import report_text as text
import tables
from cells import STARTS, TASKS


def write_report(results: Path, readme: Path) -> Path:
    """Write the report on every size that has results; returns its path. Raises ValueError where there is none."""
    files = [results / f"{name}.json" for name in ("small", "large", "tiny")]
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
    sections = [section(result, results, readme.parent) for result in found]
    if not sections:
        raise ValueError(f"{results} has no results to report. Run the study first: {text.COMMANDS['small']}")
    readme.write_text("\n\n".join([text.head(), *sections, text.TAIL]) + "\n", encoding="utf-8")
    return readme


def section(result: dict[str, Any], results: Path, folder: Path) -> str:
    """What one size found."""
    cells = result["cells"]
    parts = [f"## Results, size {result['size']}", text.machine_text(result), text.counts(tables.verdict_counts(cells))]
    parts += ["### In short", text.IN_SHORT, "\n".join(f"- {line}" for line in summary_lines(cells))]
    parts += ["### Claims", text.CLAIMS, "In how many trials:", tables.summary_table(cells)]
    parts += ["Each trial:", tables.claim_table(cells), "### Models", text.INTERVALS]
    for task in TASKS:
        for start in STARTS:
            if tables.groups_of(cells, task, start):
                parts += [
                    f"#### {text.TASK_TITLES[task]}, from {text.START_TITLES[start]}",
                    text.documents(result, task),
                ]
                parts += part(result, task, start, results, folder)
    if result["failed"]:
        parts += ["### What failed", *(f"- `{name}`: {error}" for name, error in result["failed"].items())]
    return "\n\n".join(parts)


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
    picture = results / f"{result['size']}-{task}-{start}.png"
    if curves.draw(cells, task, start, picture):
        found.append(f"![Training curves]({picture.relative_to(folder).as_posix()})")
    return found
