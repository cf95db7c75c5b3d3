"""The dashboard of a run: it reads the run's files every second, and draws them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.events import Resize
from textual.widgets import Footer, Static, TabbedContent, TabPane

from ebft.dashboard.live import LiveRun
from ebft.dashboard.training import Training
from ebft.dashboard.tui import parts
from ebft.dashboard.tui.curves import CurveGrid
from ebft.dashboard.tui.leave import LeaveDialog

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
    #log-lines { overflow-x: hidden; }
    """
    BINDINGS: ClassVar[list[Any]] = [
        Binding("ctrl+c", "interrupt", show=False, priority=True),
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
            for name in ("rollouts", "health"):
                with TabPane(TABS[name], id=name):
                    yield VerticalScroll(Static(id=f"{name}-long"))
            with TabPane(TABS["log"], id="log"):
                yield Vertical(Static(id="log-long"))
            with TabPane(TABS["run"], id="run"):
                yield VerticalScroll(Static(id="run-long"))
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
        self._update("#header", parts.header(live, width))
        active = self._base.query_one(TabbedContent).active
        if active == "curves":
            if self._drawn != (live.logs, self.size):
                self._drawn = (live.logs, self.size)
                self._base.query_one(CurveGrid).show(live.curves())
            if self._base.has_class("-spacious"):
                self._update("#rollouts-short", parts.rollouts(live.newest(), width * 2 // 5 - 4, live.config))
                self._update("#health-short", parts.health(live))
                self._update("#log-short", parts.log(live, 10))
        elif active == "rollouts":
            self._update("#rollouts-long", parts.rollouts(live.newest(), width, live.config))
        elif active == "health":
            self._update("#health-long", parts.health(live))
        elif active == "log":
            self._update("#log-long", parts.log(live, max(3, self.size.height - 7)))
        elif active == "run":
            self._update("#run-long", parts.settings(live))

    @property
    def _base(self) -> Any:
        return self.screen_stack[0]

    def _update(self, name: str, content: Any) -> None:
        self._base.query_one(name, Static).update(content)

    def on_tabbed_content_tab_activated(self) -> None:
        self.draw()

    def action_show(self, name: str) -> None:
        """Switch to a tab."""
        self._base.query_one(TabbedContent).active = name

    def action_interrupt(self) -> None:
        """Close."""
        self.exit("closed")

    def action_close(self) -> None:
        """Close."""
        self.exit("closed")


class TrainingDashboard(Dashboard):
    """The dashboard of a training process that was started with it, which it can stop.

    Returns "left" if the process is to go on, otherwise "closed".
    """

    BINDINGS: ClassVar[list[Any]] = [
        Binding("ctrl+c", "stop", "Stop", priority=True),
        Binding("ctrl+c", "interrupt", show=False, priority=True),  # once training has ended: close
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
        if self.training.interrupts > 1:
            self.notify("Stopping immediately.", severity="warning")
        else:
            text = "Stopping, with a checkpoint of the last completed step. Ctrl-C again stops immediately."
            self.notify(text, severity="warning")

    def action_close(self) -> None:
        """Close; while the training process runs, ask what becomes of it."""
        if self._has_ended():
            self.exit("closed")
        else:
            self.push_screen(LeaveDialog(), self._decide)

    def _has_ended(self) -> bool:
        """Whether training has ended, also if its process has not exited yet."""
        is_own = self.live.run.get("pid") == self.training.pid
        return not self.training.is_running() or (is_own and self.live.state not in ("running", "lost"))

    def _decide(self, choice: str | None) -> None:
        if choice == "leave":
            self.exit("left")
        elif choice == "stop":
            self.action_stop()
