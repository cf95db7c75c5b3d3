"""The parts of the dashboard, each a text made from the state of a run."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ebft.dashboard.live import LiveRun, clock
from ebft.dashboard.rollouts import Sample
from ebft.dashboard.run import logs_rollouts, samples_rollouts, settings_in_effect
from ebft.dashboard.text import duration, value_text
from ebft.printed import printable

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
