"""Writes pictures of what ebft prints: `python docs/screenshots.py RUN QUICKSTART`, the folders of a run, for
docs/watching.md, and of a quickstart, for README.md."""

import asyncio
import json
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ebft.tools.dashboard.tui import Dashboard

IMAGES = Path(__file__).parent / "images"
PAGES = {"dashboard.svg": ((160, 48), "1"), "dashboard-80x24.svg": ((80, 24), "1"), "rollouts.svg": ((80, 24), "2")}
METRICS = {"ce_loss": "cross-entropy, nats a token", "cfm_loss": "feature-matching loss"}


async def save(folder: Path, name: str, size: tuple[int, int], key: str) -> None:
    """Save a tab of the dashboard in a terminal of `size` characters."""
    app = Dashboard(folder, interval=0.2)
    async with app.run_test(size=size) as pilot:
        await pilot.pause(1.0)
        await pilot.press(key)
        await pilot.pause(1.0)
        app.save_screenshot(str(IMAGES / name))


def save_quickstart(folder: Path) -> None:
    """Save the greedy completions of a quickstart before and after, and two of its metrics."""
    found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    console = Console(record=True, width=92, file=StringIO())
    table = Table("prompt", "before", "after", "reference", show_lines=True)
    for sample in found["samples"]:
        before = " ".join(sample["before"].split())
        shown = [sample[key].replace("<|im_end|>", "").strip() for key in ("prompt", "after", "reference")]
        table.add_row(shown[0], f"[red]{before[:90]} ...", f"[green]{shown[1]}", shown[2])
    console.print(table)
    for name, words in METRICS.items():
        error = found["change_standard_error"][name]
        console.print(f"{words:28} {found['before'][name]:.3f} → {found['after'][name]:.3f} (± {error:.1g})")
    console.save_svg(str(IMAGES / "quickstart.svg"), title="ebft quickstart: SmolLM2-135M, before and after 28 steps")


if __name__ == "__main__":
    for page, (terminal, tab) in PAGES.items():
        asyncio.run(save(Path(sys.argv[1]), page, terminal, tab))
    save_quickstart(Path(sys.argv[2]))
