"""Writes the screenshots of docs/watching.md, of the run in a folder: `python docs/screenshots.py FOLDER`."""

import asyncio
import sys
from pathlib import Path

from ebft.tools.dashboard.tui import Dashboard

PAGES = {"dashboard.svg": ((160, 48), "1"), "dashboard-80x24.svg": ((80, 24), "1"), "rollouts.svg": ((80, 24), "2")}


async def save(folder: Path, name: str, size: tuple[int, int], key: str) -> None:
    """Save a tab of the dashboard in a terminal of `size` characters."""
    app = Dashboard(folder, interval=0.2)
    async with app.run_test(size=size) as pilot:
        await pilot.pause(1.0)
        await pilot.press(key)
        await pilot.pause(1.0)
        app.save_screenshot(str(Path(__file__).parent / "images" / name))


if __name__ == "__main__":
    (Path(__file__).parent / "images").mkdir(exist_ok=True)
    for page, (terminal, tab) in PAGES.items():
        asyncio.run(save(Path(sys.argv[1]), page, terminal, tab))
