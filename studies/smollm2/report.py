"""README.md of the study, from results/ alone; what is missing is listed."""

from __future__ import annotations

from pathlib import Path

import stored
from cells import all_cells
from scale import SCALES


def write_report(results: Path, readme: Path) -> Path:
    """Write the report on the cells that have results; returns its path."""
    done = {cell["cell"]["name"] for cell in stored.load_cells(results)}
    lines = ["# EBFT, SFT and RLVR on SmolLM2-135M-Instruct"]
    for cell in all_cells(SCALES["smollm2"].seeds):
        lines.append(f"- {cell.name}{'' if cell.name in done else ': missing'}")
    readme.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return readme
