"""The dashboard in several sizes, over files that grow, break and vanish."""

import asyncio
import shutil
import time

import pytest

from ebft.monitor.run_files import remove_from_step
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
    message["remedy"] = "Do x."
    append(folder / "health.jsonl", message)
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


def test_the_states_of_a_run(run):
    """Each as the file is rewritten."""
    states = (
        ("finished", {}, "finished"),
        ("failed", {"error": "OSError: disk [full]"}, "failed"),
        ("running", {"pid": 2**22 + 1}, "ended without a final state"),
        ("running", {"host": "elsewhere", "updated": 1.0}, "no update for"),
        ("\x1b]0;title\x07", {}, "␛]0;title␇"),
    )

    async def body(app, pilot):
        for key in "13":
            await pilot.press(key)
            for state, changes, text in states:
                write_run(run, state, step=100, **changes)
                shown = {"1": "alignment", "3": changes.get("error", "Too [high].")}
                found = await shows(app, pilot, text, "step 100", shown[key])
                assert ("ETA" in found) == (changes.get("host") == "elsewhere")

    dashboard(run, body)


def test_files_that_grow_break_vanish_and_start_again(run):
    async def body(app, pilot):
        await shows(app, pilot, "63/100", "alignment")
        shutil.move(run, run.with_name("away"))
        await shows(app, pilot, "folder not found")
        await pilot.press("3")
        shutil.move(run.with_name("away"), run)
        await shows(app, pilot, "63/100", "running", "Too [high].")
        await pilot.press("1")
        append(run / "metrics.jsonl", log_line(64, loss=0.987))
        await shows(app, pilot, "64/100", "0.987")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 65, "loss": 0.9')
            file.flush()
            await asyncio.sleep(0.2)
            assert "64/100" in screen(app) and "unreadable" not in screen(app)
            file.write('01, "grad_norm": 1}\n')
        await shows(app, pilot, "65/100", "0.901")
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(b'{"step": 66\n\xff\xff\n[]\n{"step": 67, "loss": "x", "time": {}}\n')
        await shows(app, pilot, "67/100", "3 unreadable lines")
        (run / "run.json").write_text("{")
        await shows(app, pilot, "waiting for files", "step 67")
        write_run(run, step=68)
        await shows(app, pilot, "running", "68/100")
        write_run(run, step=20)  # the run is resumed
        remove_from_step(run / "metrics.jsonl", 21)
        remove_from_step(run / "rollouts.jsonl", 20)
        await shows(app, pilot, "20/100", "0.3")
        await pilot.press("2")
        await shows(app, pilot, "No rollouts yet: waiting for the first step.")

    dashboard(run, body)


class Process:
    """A training process as the dashboard sees it."""

    def __init__(self):
        self.runs, self.interrupts, self.pid = True, 0, 1

    def is_running(self):
        return self.runs

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
        for key in keys:
            await pilot.press(key)
            await asyncio.sleep(0.1)
            if process.interrupts:
                await shows(app, pilot, "Stopping, with a" if process.interrupts == 1 else "Stopping immediately.")
        if result is None:
            process.runs = False
            await pilot.press("q")

    app = dashboard(run, body, make=TrainingDashboard, training=process)
    assert app.return_value == (result or "closed") and process.interrupts == interrupts
