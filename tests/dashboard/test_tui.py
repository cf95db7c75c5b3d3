"""The dashboard in several sizes, over files that grow, break and vanish."""

import asyncio
import shutil
import time

import pytest
from rich.console import Console

from ebft.monitor.run_files import remove_from_step
from ebft.tools.dashboard.live import LiveRun
from ebft.tools.dashboard.panels import header, health, rollouts
from ebft.tools.dashboard.tui import Dashboard, TrainingDashboard
from tests.dashboard.runs import append, held_out_line, log_line, strided_entry, write_run

SIZES = [(40, 12), (160, 48)]


def screen(app):
    """The text on the screen."""
    strips = app.screen._compositor.render_strips()  # textual has no public access to it, apart from slow SVG files
    return "\n".join(strip.text for strip in strips)


async def shows(app, pilot, *texts):
    """Wait until all texts are on the screen."""
    for _ in range(600):
        await asyncio.sleep(0.05)  # pilot.pause waits for an idle processor, and this dashboard draws all the time
        found = screen(app)
        if all(text in found for text in texts):
            return found
    raise AssertionError(f"{texts} not in\n{found}")


def dashboard(folder, body, size=(80, 24), make=Dashboard, **arguments):
    """Run `body(app, pilot)` in a dashboard; returns the dashboard."""

    async def run():
        app = make(folder, **arguments, interval=0.1)
        async with app.run_test(size=size, notifications=True) as pilot:
            await body(app, pilot)
        return app

    return asyncio.run(run())


@pytest.fixture
def run(tmp_path):
    """A running run at step 63 of 100, started 130 seconds ago, with all files."""
    folder, now = tmp_path / "my-run", time.time()
    write_run(folder, step=63, started=now - 130)
    append(folder / "metrics.jsonl", *(log_line(step, time=now - 126 + 2 * step) for step in range(1, 64)))
    append(folder / "metrics.jsonl", held_out_line(60, 0.07))
    append(folder / "rollouts.jsonl", strided_entry(61), strided_entry(62))
    message = {"time": "2026-01-01T10:00:00", "step": 40, "since": 38, "name": "grad_norm", "message": "Too [high]."}
    append(folder / "health.jsonl", {**message, "remedy": "Do x."})
    (folder / "train.log").write_text("Loading [bold]\n10%|#  \r 50%|##\rdone\n")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_every_tab_in_every_size(run, size):
    async def body(app, pilot):
        found = await shows(app, pilot, "my-run", "63/100", "ETA 1m14s", "alignment", "0.515")
        is_spacious = size == (160, 48)
        assert ("completion 0 of step 62" in found) == ("Too [high]." in found) == is_spacious
        if size[0] >= 80:
            assert "running" in found and "EBFT in strided mode" in found and "diversity" in found
            assert "2 s/step  1,234 tok/s  4.00 docs/s  1.5 GiB peak" in found and "[0.3-1.9]" in found
        await pilot.press("2")
        await shows(app, pilot, "step 62, token 5", "reference", "return a + b", "completion 0 of step 62", "+0.100")
        await pilot.press("3")
        await shows(app, pilot, "grad_norm", "Too [high].", "Do x.")
        await pilot.press("4")
        found = await shows(app, pilot, "Loading [bold]", "done")
        assert "10%" not in found
        await pilot.press("5")
        await shows(app, pilot, "model", "some/model")
        await pilot.press("1")
        await shows(app, pilot, "alignment")
        await pilot.press("q")

    assert dashboard(run, body, size).return_value == "closed"


def shown(live):
    """The header and the health messages as text, after another look at the files."""
    live.poll()
    console = Console(width=100)
    with console.capture() as capture:
        console.print(header(live, 100), health(live))
    return capture.get()


@pytest.mark.parametrize(("state", "changes", "texts"), [
    ("finished", {}, ["finished"]), ("failed", {"error": "OSError: disk [full]"}, ["failed", "disk [full]"]),
    ("running", {"pid": 2**22 + 1}, ["ended without a final state"]),
    ("running", {"host": "elsewhere", "updated": 1.0}, ["no update for", "ETA"]),
    ("\x1b]0;title\x07", {}, ["␛]0;title␇"]),
])  # fmt: skip
def test_the_states_of_a_run(run, state, changes, texts):
    write_run(run, state, step=100, **changes)
    found = shown(LiveRun(run))
    assert all(text in found for text in (*texts, "step 100", "Too [high].")) and ("ETA" in found) == ("ETA" in texts)
    assert found.split("\n")[2].startswith("Outcome: unknown.") == ("ETA" not in texts)


def test_files_that_grow_break_vanish_and_start_again(run):
    live = LiveRun(run)
    shutil.move(run, run.with_name("away"))
    assert "folder not found" in shown(live)
    shutil.move(run.with_name("away"), run)
    found = shown(live)
    assert "63/100" in found and "running" in found and "Too [high]." in found
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 65, "loss": 0.9')
        file.flush()
        assert "63/100" in shown(live) and live.corrupted == 0
        file.write('01, "grad_norm": 1}\n')
    assert "65/100" in shown(live) and live.metrics.latest["loss"] == 0.901
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 66\n\xff\xff\n[]\n{"step": 67, "loss": "x", "time": {}}\n')
    found = shown(live)
    assert "67/100" in found and "3 unreadable lines" in found
    (run / "run.json").write_text("{")
    found = shown(live)
    assert "waiting for files" in found and "step 67" in found
    write_run(run, step=20)  # the run is resumed
    remove_from_step(run / "metrics.jsonl", 21)
    remove_from_step(run / "rollouts.jsonl", 20)
    assert "20/100" in shown(live) and live.newest() == []
    assert live.metrics.series["loss"].steps == [*range(1, 21)]
    assert str(rollouts(live.newest(), 80, live.config)) == "No rollouts yet: waiting for the first step."


class Process:
    """A training process as the dashboard sees it."""

    pid, interrupts, is_running = 1, 0, lambda self: True

    def interrupt(self):
        self.interrupts += 1


@pytest.mark.parametrize(
    ("keys", "result", "interrupts"),
    [(["q", "c", "q", "l"], "left", 0), (["q", "s"], None, 1), (["ctrl+c", "ctrl+c"], None, 2)],
)
def test_closing_the_dashboard_of_a_training_process(run, keys, result, interrupts):
    process = Process()

    async def body(app, pilot):
        await shows(app, pilot, "63/100", "Stop")
        append(run / "metrics.jsonl", log_line(64, loss=0.987))
        await shows(app, pilot, "64/100", "0.987")
        for key in keys:
            await pilot.press(key)
            await asyncio.sleep(0.1)
            if process.interrupts:
                await shows(app, pilot, "Stopping, with a" if process.interrupts == 1 else "Stopping immediately.")
        if result is None:
            process.is_running = lambda: False
            await pilot.press("q")

    app = dashboard(run, body, make=TrainingDashboard, training=process)
    assert app.return_value == (result or "closed") and process.interrupts == interrupts
