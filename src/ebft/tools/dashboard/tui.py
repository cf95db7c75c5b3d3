"""The dashboard of a run: it reads the run's files every second, and draws them."""

from __future__ import annotations

import asyncio
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult, RenderResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.events import Resize
from textual.widget import Widget
from textual.widgets import Footer, Static, TabbedContent, TabPane

from ebft.monitor.run_state import logs_rollouts, samples_rollouts, settings_in_effect
from ebft.printed import printable
from ebft.tools.dashboard.live import Curve, LiveRun, clock
from ebft.tools.dashboard.plots import plot
from ebft.tools.dashboard.rollouts import Sample, duration, value_text
from ebft.tools.dashboard.training import LeaveDialog, Training

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


STATES = {
    "running": ("running", "bold green"),
    "finished": ("finished", "bold blue"),
    "stopped": ("stopped", "bold yellow"),
    "failed": ("failed", "bold white on red"),
    "lost": ("ended without a final state", "bold white on red"),
    "unknown": ("waiting for files", "bold yellow"),
}
_SPEEDS = (
    ("throughput/generated_tokens_per_s", "{:,.0f} tok/s"),
    ("throughput/documents_per_s", "{:.2f} docs/s"),
    ("memory/peak_gib", "{:.1f} GiB peak"),
)
_PROMPT_LINES, _TEXT_LINES = 3, 6
_TERM, _MIN_TEXT = 9, 30  # characters of a term's column, and of the text at least
_NARROW = 60  # characters; the header is shorter below
_STALE = 300.0  # seconds without an update that are shown


def header(live: LiveRun, width: int) -> Text:
    """Three lines: name, state, progress and times; a progress bar; method, speeds and memory."""
    label, style = STATES.get(live.state, (printable(live.state).replace("\n", " "), "bold"))
    if live.is_missing:
        label, style = "folder not found", "bold white on red"
    left = Text.assemble((printable(live.folder.absolute().name), "bold"), "  ", (f" {label} ", style))
    total = live.max_steps
    right = Text(f"step {live.step:g}" + (f"/{total}" if total else ""))
    run, remaining = live.seconds_run(), live.seconds_left()
    right.append("" if run is None or width < _NARROW else f"  elapsed {duration(run)}")
    right.append("" if remaining is None else f"  ETA {duration(remaining)}", style="bold")
    first = _spread(left, right, width)
    return Text("\n").join([first, _bar(live.step / total if total else 0.0, width), _facts(live, width)])


def _spread(left: Text, right: Text, width: int) -> Text:
    left.truncate(max(8, width - right.cell_len - 1), overflow="ellipsis")
    return Text.assemble(left, " " * max(1, width - left.cell_len - right.cell_len), right, no_wrap=True)


def _bar(fraction: float, width: int) -> Text:
    done = round(min(1.0, fraction) * width)
    return Text.assemble(("━" * done, "green"), ("━" * (width - done), "grey30"), no_wrap=True)


def _facts(live: LiveRun, width: int) -> Text:
    latest = live.metrics.latest
    facts = [text.format(latest[name]) for name, text in _SPEEDS if name in latest]
    each = live.seconds_per_step()
    facts = ([] if each is None else [f"{each:.3g} s/step"]) + facts
    if live.state == "running" and live.seconds_since_update() > _STALE:
        facts.append(f"no update for {duration(live.seconds_since_update())}")
    if live.corrupted:
        facts.append(f"{live.corrupted} unreadable lines")
    left, right = Text(printable(str(live.run.get("method") or "")), style="dim"), Text("  ".join(facts))
    return _spread(left, right, width)


def rollouts(samples: list[Sample], width: int, config: dict[str, Any]) -> RenderableType:
    """The newest samples: each prompt, then the reference above its completions with the terms of their rewards."""
    if not samples:
        return Text(_no_rollouts(config), style="dim")
    parts: list[RenderableType] = []
    for (step, place, prompt, reference), found in groupby(samples, key=lambda sample: sample.origin):
        group = list(found)
        parts.append(Text(f"step {step}" + (f", {place}" if place else ""), style="bold"))
        if prompt:
            parts.append(Text(_end(prompt, _PROMPT_LINES, width * _PROMPT_LINES), style="dim"))
        names = list(dict.fromkeys(name for sample in group for name in sample.terms))
        names = names[: max(1, (width - _MIN_TEXT) // (_TERM + 1))]
        table = Table(expand=True, box=None, padding=(0, 1, 0, 0), show_header=True, header_style="dim")
        table.add_column("reference, then completions", ratio=1, overflow="fold")
        for name in names:
            table.add_column(name.rpartition("/")[2][:_TERM], width=_TERM, justify="right", no_wrap=True)
        if reference is not None:
            table.add_row(Text(_start(reference, _TEXT_LINES, _TEXT_LINES * width), style="green"))
        for sample in group:
            text = Text(_start(sample.completion, _TEXT_LINES, _TEXT_LINES * width), style="cyan")
            table.add_row(text, *(value_text(name, sample.terms.get(name)) for name in names))
        parts += [table, Text("")]
    return Group(*parts)


def _no_rollouts(config: dict[str, Any]) -> str:
    if config and not samples_rollouts(config):
        return "The method of this run samples no rollouts."
    is_logged, _ = logs_rollouts(config)
    if is_logged:
        return "No rollouts yet: waiting for the first step."
    return (
        "No rollouts yet. They are shown if ebft.log_completions (strided mode) or trl.log_completions (structured "
        "mode, GRPO) is true."
    )


def _start(text: str, lines: int, characters: int) -> str:
    text = printable(text)
    shown = "\n".join(text.split("\n")[:lines])[:characters]
    return shown + ("" if shown == text else " ...")


def _end(text: str, lines: int, characters: int) -> str:
    text = printable(text)
    shown = "\n".join(text.rstrip("\n").split("\n")[-lines:])[-characters:]
    return ("" if shown == text.rstrip("\n") else "... ") + shown


def health(live: LiveRun, newest: int | None = None) -> RenderableType:
    """The health messages, newest first, each with what to do; the error of a run that failed above them."""
    parts: list[RenderableType] = []
    if live.run.get("error"):
        parts.append(Text(f"Error: {printable(str(live.run['error']))}\n", style="red"))
    for message in list(reversed(live.health))[:newest]:
        since = message.get("since")
        when = f"step {message.get('step')}" + (f" (since step {since})" if since is not None else "")
        text = Text.assemble((f"{clock(message.get('time'))}  {when}  ", "dim"), (_of(message, "name"), "bold yellow"))
        text.append(f"\n{_of(message, 'message')}")
        if message.get("remedy"):
            text.append(f"\n{_of(message, 'remedy')}", style="italic dim")
        parts.append(Text.assemble(text, "\n"))
    return Group(*parts) if parts else Text("No health messages.", style="dim")


def _of(message: dict[str, Any], key: str) -> str:
    return printable(str(message.get(key) or ""))


def log(live: LiveRun, lines: int) -> Text:
    """The last lines of the log; of a line that was rewritten, such as a progress bar, the last version."""
    if not live.log:
        return Text("No log: console output is recorded in train.log by `ebft train --tui`.", style="dim")
    shown = [printable(line.rstrip("\r").rpartition("\r")[2].replace("\t", "    ")) for line in list(live.log)[-lines:]]
    return Text("\n".join(shown), no_wrap=True, overflow="ellipsis")


def settings(live: LiveRun) -> RenderableType:
    """The config options that differ from their defaults, the process and the versions."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for key in ("model", "output_dir", "host", "pid"):
        if key in live.run:
            table.add_row(key, Text(printable(str(live.run[key]))))
    for title in ("changed", "versions"):
        values = settings_in_effect(live.run) if title == "changed" else live.run.get(title)
        if isinstance(values, dict) and values:
            table.add_row("")
            heading = "config (not default)" if title == "changed" else title
            table.add_row(Text(heading, style="dim not bold"))
            for key, value in values.items():
                table.add_row(Text(printable(str(key))), Text(printable(str(value))))
    return table


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
        """Draw these curves."""
        plots = list(self.query(CurvePlot))
        for extra in plots[len(curves) :]:
            extra.remove()
        new = [CurvePlot() for _ in curves[len(plots) :]]
        if new:
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
