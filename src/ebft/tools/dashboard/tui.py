"""The terminal dashboard of a run, drawn from its files every second, and the process of a training that it follows."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from textual.app import App, ComposeResult, RenderResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.events import Resize
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Footer, Static, TabbedContent, TabPane

from ebft.errors import RunError, doing
from ebft.files import is_free
from ebft.machine import TYPED
from ebft.printed import without_secrets_in_text
from ebft.run_files import LOG
from ebft.tools.dashboard.live import Curve, LiveRun
from ebft.tools.dashboard.panels import header, health, log, plot, rollouts, settings

INTERVAL = 1.0  # seconds between two looks at the files
TABS = {"curves": "Curves", "rollouts": "Rollouts", "health": "Health", "log": "Log", "run": "Run"}
_WIDE, _HIGH = 120, 36  # from this size on, the first tab also shows rollouts, health messages and the log


class Dashboard(App[str]):
    """Follows the run in `folder`. Closing it does not affect the run."""

    TITLE = "ebft"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #header { height: 3; padding: 0 1; }
    TabbedContent { height: 1fr; }
    TabPane { padding: 0; }
    VerticalScroll { padding: 0 1; scrollbar-size-vertical: 1; }
    #side, #below { display: none; }
    Screen.-spacious #side { display: block; width: 2fr; border-left: solid $surface-lighten-2; }
    Screen.-spacious #plots { width: 3fr; }
    Screen.-spacious #below { display: block; height: 11; border-top: solid $surface-lighten-2; }
    #health-short { width: 1fr; }
    #log-short { width: 1fr; border-left: solid $surface-lighten-2; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[Any]] = [
        Binding("ctrl+c", "close", show=False, priority=True),
        Binding("q", "close", "Close"),
        *(Binding(str(index), f"show('{name}')", title) for index, (name, title) in enumerate(TABS.items(), 1)),
    ]

    def __init__(self, folder: Path, interval: float = INTERVAL) -> None:
        super().__init__()
        self.live = LiveRun(folder)
        self._interval = interval
        self._drawn: Any = None  # the state of the curves that was drawn last

    def compose(self) -> ComposeResult:
        yield Static(id="header")
        with TabbedContent():
            with TabPane(TABS["curves"], id="curves"):
                with Horizontal(id="upper"):
                    yield CurveGrid(id="plots")
                    yield VerticalScroll(Static(id="rollouts-short"), id="side")
                with Horizontal(id="below"):
                    yield VerticalScroll(Static(id="health-short"))
                    yield Static(id="log-short")
            for name in ("rollouts", "health", "log", "run"):
                with TabPane(TABS[name], id=name):
                    container = Vertical if name == "log" else VerticalScroll  # the log's end is shown, and fits
                    yield container(Static(id=f"{name}-long"))
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.run_worker(self._follow(), exclusive=True)

    def on_resize(self, event: Resize) -> None:
        self._base.set_class(event.size.width >= _WIDE and event.size.height >= _HIGH, "-spacious")
        self.call_after_refresh(self.draw)

    async def _follow(self) -> None:
        while True:
            await asyncio.to_thread(self.live.poll)
            self.draw()
            await asyncio.sleep(self._interval)

    def draw(self) -> None:
        """Draw the visible parts again."""
        if not self._base.query("#header"):  # before the first layout, and while the dashboard closes
            return
        live = self.live
        width = max(20, self.size.width - 2)
        self._update("#header", header(live, width))
        active = self._base.query_one(TabbedContent).active
        if active == "curves":
            if self._drawn != (live.logs, self.size):
                self._drawn = (live.logs, self.size)
                self._base.query_one(CurveGrid).show(live.curves())
            if self._base.has_class("-spacious"):
                self._update("#rollouts-short", rollouts(live.newest(), width * 2 // 5 - 4, live.config))
                self._update("#health-short", health(live))
                self._update("#log-short", log(live, 10))
        elif active == "rollouts":
            self._update("#rollouts-long", rollouts(live.newest(), width, live.config))
        elif active == "health":
            self._update("#health-long", health(live))
        elif active == "log":
            self._update("#log-long", log(live, max(3, self.size.height - 7)))
        elif active == "run":
            self._update("#run-long", settings(live))

    @property
    def _base(self) -> Any:
        return self.screen_stack[0]

    def _update(self, name: str, content: Any) -> None:
        self._base.query_one(name, Static).update(content)

    def on_tabbed_content_tab_activated(self) -> None:
        self.draw()

    def action_show(self, name: str) -> None:
        self._base.query_one(TabbedContent).active = name

    def action_close(self) -> None:
        self.exit("closed")


_MIN_WIDTH, _MIN_HEIGHT, _MAX_HEIGHT = 36, 8, 14


class CurvePlot(Widget):
    """One curve, drawn in the size that it has."""

    DEFAULT_CSS = "CurvePlot { width: 1fr; height: 1fr; padding: 0 1 0 0; }"
    curve: Curve | None = None

    def render(self) -> RenderResult:
        width, height = self.content_size
        return "" if self.curve is None else plot(self.curve, width, height)


class CurveGrid(VerticalScroll):
    """A grid of curves; the rows fill the height if they fit, otherwise it scrolls."""

    DEFAULT_CSS = "CurveGrid { layout: grid; grid-gutter: 0 1; }"

    def show(self, curves: list[Curve]) -> None:
        plots = list(self.query(CurvePlot))
        for extra in plots[len(curves) :]:
            extra.remove()
        new = [CurvePlot() for _ in curves[len(plots) :]]
        self.mount_all(new)
        for widget, curve in zip([*plots, *new], curves):
            widget.curve = curve
            widget.refresh()
        self._arrange(len(curves))

    def _arrange(self, count: int) -> None:
        width, height = self.size
        columns = max(1, min(count, width // _MIN_WIDTH))
        rows = max(1, -(-count // columns))
        self.styles.grid_size_columns = columns
        self.styles.grid_rows = str(max(_MIN_HEIGHT, min(_MAX_HEIGHT, height // rows)))

    def on_resize(self, event: Any) -> None:
        self._arrange(len(self.query(CurvePlot)))


class Training:
    """The process of `ebft train ARGUMENTS` in a session of its own, with its output in train.log."""

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        self.log = folder / LOG
        self.interrupts = 0
        typed = ["ebft", "train", arguments[0], "--tui", *arguments[1:]]  # which is how it is resumed
        with doing(f"starting training with its log in {self.log}"):
            folder.mkdir(parents=True, exist_ok=True)
            if not is_free(self.log, b"--- "):
                raise RunError(f"{self.log} is not the log of a run, and is kept. Set output_dir to another folder.")
            with self.log.open("ab") as log:
                words = without_secrets_in_text(" ".join(arguments))
                line = f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} ebft train {words}\n"
                log.write(line.encode(errors="backslashreplace"))
                self._log_start = log.tell()
                log.flush()
                self._process = subprocess.Popen(
                    [sys.executable, "-u", "-m", "ebft", "train", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", "EBFT_TUI": "0", TYPED: json.dumps(typed)},
                )

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_running(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def interrupt(self) -> None:
        """Do what Ctrl-C does in its terminal: stop after the step with a checkpoint, the second time immediately."""
        self.interrupts += 1
        if self.is_running():
            self._process.send_signal(signal.SIGINT)

    def wait(self) -> int:
        """Wait for the process; Ctrl-C interrupts it. Returns its exit status, 128 + n after signal n."""
        while True:
            try:
                status = self._process.wait()
                return status if status >= 0 else 128 - status
            except KeyboardInterrupt:
                self.interrupt()

    def output(self, lines: int) -> list[str]:
        """The last lines of its output."""
        text = self.log.read_bytes()[self._log_start :].decode("utf-8", errors="replace")
        found = [line.rpartition("\r")[2] for line in text.split("\n")]
        return [line for line in found if line.strip()][-lines:]


_QUESTION = """\
[b]Training is running.[/b]

[b]l[/b]  leave it running and close the dashboard
[b]s[/b]  stop it after this step, with a checkpoint
[b]c[/b]  go back (also Escape)"""


class LeaveDialog(ModalScreen[str]):
    """Asks whether to leave ("leave") or stop ("stop") the training, or to go back ("back")."""

    DEFAULT_CSS = """
    LeaveDialog { align: center middle; }
    LeaveDialog Vertical { width: 56; height: auto; padding: 1 2; border: round $warning; background: $surface; }
    """
    BINDINGS: ClassVar[list[Any]] = [
        Binding("l", "dismiss('leave')", "Leave"),
        Binding("s", "dismiss('stop')", "Stop"),
        Binding("c,escape,q", "dismiss('back')", "Back"),
    ]

    def compose(self) -> ComposeResult:
        yield Vertical(Static(_QUESTION))


class TrainingDashboard(Dashboard):
    """The dashboard of a training process, which it can stop; returns "left" if the process is to go on."""

    BINDINGS: ClassVar[list[Any]] = [
        Binding("ctrl+c", "stop", "Stop", priority=True),
        Binding("ctrl+c", "close", show=False, priority=True),  # once training has ended
    ]

    def __init__(self, folder: Path, training: Training, interval: float = INTERVAL) -> None:
        super().__init__(folder, interval)
        self.training = training
        self._knows_the_end = False

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether an action is possible: training can be stopped as long as it runs."""
        return not (action == "stop" and self._has_ended())

    def draw(self) -> None:
        """Draw the visible parts again; when training has ended, also the keys, without the question about it."""
        super().draw()
        if self._has_ended() and not self._knows_the_end:
            self._knows_the_end = True
            self.refresh_bindings()
            if isinstance(self.screen, LeaveDialog):
                self.screen.dismiss("back")

    def action_stop(self) -> None:
        """Stop training after its step, or at once the second time."""
        self.training.interrupt()
        text = "Stopping, with a checkpoint of the last completed step. Ctrl-C again stops immediately."
        self.notify("Stopping immediately." if self.training.interrupts > 1 else text, severity="warning")

    def action_close(self) -> None:
        """Close; while the training process runs, ask what becomes of it."""
        if self._has_ended():
            self.exit("closed")
        else:
            acts = {"leave": lambda: self.exit("left"), "stop": self.action_stop, "back": lambda: None}
            self.push_screen(LeaveDialog(), lambda choice: acts[choice or "back"]())

    def _has_ended(self) -> bool:
        """Whether training has ended, also if its process has not exited yet."""
        is_own = self.live.run.get("pid") == self.training.pid
        return not self.training.is_running() or (is_own and self.live.state not in ("running", "lost"))
