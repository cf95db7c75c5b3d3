"""What the terminal dashboard shows: line plots, drawn with braille characters (two by four dots each), and texts."""

from collections import Counter
from itertools import groupby, pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ebft.printed import duration, printable
from ebft.run_files import logs_rollouts, samples_rollouts, settings_in_effect
from ebft.tools.dashboard.live import Curve, LiveRun, Range, Series, clock, range_text
from ebft.tools.dashboard.rollouts import Sample, value_text

COLORS = ("cyan", "magenta", "yellow", "green", "red", "blue")
HEALTHY = "on #12351f"  # background of the healthy range
_LABEL = 10  # characters of the labels of the vertical axis
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a character, by column and row


def plot(curve: Curve, width: int, height: int) -> Text:
    """Draw a curve in `height` lines of `width` characters: a title, the plot, and the steps below it."""
    rows, columns = height - 2, width - _LABEL
    title = title_of(curve, width)
    if rows < 1 or columns < 4 or not curve.last_values():
        return title
    (low, high), (first, last) = axes(curve)
    # The middle of an axis is between two dots: with a hundredth of a dot more, a flat line stays on one dot.
    height_of = lambda value: round((high - min(high, max(low, value))) / (high - low) * (rows * 4 - 1) + 0.01)
    dots, owners = Counter(), {}  # of each character, by row and column: its dots, and the number of the series
    for owner, series in enumerate(curve.series.values()):
        values = enumerate(columns_of(series, columns * 2, first, last))
        points = [(x, min(rows * 4 - 1, height_of(y))) for x, y in values if y is not None]
        for start, end in pairwise(points[:1] + points):
            steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
            for step in range(steps + 1):
                x, y = (round(a + (b - a) * step / steps) for a, b in zip(start, end))
                dots[y // 4, x // 2] |= _DOTS[x % 2][y % 4]
                owners[y // 4, x // 2] = owner
    shaded = band(curve.healthy, low, high)
    lines = [title]
    for row in range(rows):
        middle = high - (row + 0.5) / rows * (high - low)
        label = number(high if row == 0 else low) if row in (0, rows - 1) else ""
        line = Text(f"{label:>{_LABEL - 1}} ", style="dim", no_wrap=True)
        background = Style.parse(HEALTHY) if shaded and shaded[0] <= middle <= shaded[1] else Style()
        for owner, cells in groupby(((row, column) for column in range(columns)), key=lambda cell: owners.get(cell, 0)):
            text = "".join(chr(0x2800 + dots[cell]) if cell in dots else " " for cell in cells)
            line.append(text, style=Style(color=COLORS[owner % len(COLORS)], dim=False) + background)
        lines.append(line)
    start, end = f"{first:.0f}", f"step {last:.0f}"
    space = max(1, columns - len(start) - len(end))
    return Text("\n").join([*lines, Text(" " * _LABEL + start + " " * space + end, style="dim", no_wrap=True)])


def title_of(curve: Curve, width: int) -> Text:
    """The name, the last values and the healthy range of a curve in one line; the first value outside is in red."""
    text = Text(curve.title, style="bold", no_wrap=True)
    for index, (label, value) in enumerate(curve.last_values().items()):
        color = COLORS[index % len(COLORS)]
        low, high = curve.healthy or (None, None)
        outside = (low is not None and value < low) or (high is not None and value > high)
        name = "" if label == curve.title else f"{label} "
        text.append(f"  {name}{number(value)}", style="not bold red" if outside else f"not bold {color}")
    if curve.wanted:
        text.append(f" {curve.wanted}", style="not bold dim")
    outside = outside_text(curve)
    text.append(f"  {outside}" if outside else "", style="not bold dim")
    if curve.healthy is not None:
        text.append(f"  [{range_text(curve.healthy)}]", style="not bold green")
    text.truncate(width, overflow="ellipsis")
    return text


def columns_of(series: Series, count: int, first: float, last: float) -> list[float | None]:
    """Means of the values of a series in `count` equal ranges of steps from `first` to `last`; None where none is."""
    sums, counts = [0.0] * count, [0] * count
    scale = (count - 1) / (last - first) if last > first else 0.0
    for step, value in zip(series.steps, series.values):
        column = min(count - 1, max(0, round((step - first) * scale)))
        sums[column] += value
        counts[column] += 1
    return [total / size if size else None for total, size in zip(sums, counts)]


def axes(curve: Curve) -> tuple[tuple[float, float], tuple[float, float]]:
    """The lowest and the highest value of the axis of a curve with at least one value, and its first and last step."""
    steps = [step for series in curve.series.values() for step in series.steps]
    return limits(_values(curve), curve.healthy, curve.rounding), (min(steps), max(steps))


def _values(curve: Curve) -> list[float]:
    return [value for series in curve.series.values() for value in series.values]


_OUTSIDE, _FEWEST = 100, 10  # one of a hundred values may be outside the axis, if there are at least ten
_FLATTENED = 0.25  # part of the axis, below which the other values are drawn without the outliers
_RELATIVE = 1e-6  # rounding errors of float32, relative to the values


def _bulk(values: list[float]) -> tuple[float, float]:
    """The range of `values`, without the few furthest ones if these would flatten the others."""
    ordered = sorted(values)
    bottom, top = 0, len(ordered) - 1
    for _ in range(max(1, len(ordered) // _OUTSIDE) if len(ordered) >= _FEWEST else 0):
        is_high = ordered[top] - ordered[top - 1] > ordered[bottom + 1] - ordered[bottom]
        bottom, top = (bottom, top - 1) if is_high else (bottom + 1, top)
    low, high = ordered[bottom], ordered[top]
    is_flattened = high - low < _FLATTENED * (ordered[-1] - ordered[0])
    return (low, high) if is_flattened else (ordered[0], ordered[-1])


def outside_text(curve: Curve) -> str:
    """The furthest values that are outside the axis of a curve, such as `max 123`; empty if there are none."""
    values = _values(curve)
    if not values:
        return ""
    low, high = limits(values, curve.healthy, curve.rounding)
    lowest = f"min {number(min(values))}" if min(values) < low else ""
    highest = f"max {number(max(values))}" if max(values) > high else ""
    return ", ".join(filter(None, [lowest, highest]))


def limits(values: list[float], healthy: Range | None, rounding: float = 0.0) -> tuple[float, float]:
    """Return the lowest and the highest value of the axis for `values` (at least one).

    A bound of the healthy range is included if it is not further away than twice the spread of the values. Values that
    differ by rounding errors only are flat, and a few outliers are outside the axis if they would flatten the others.
    """
    low, high = min(values), max(values)
    if high - low <= max(rounding, _RELATIVE * max(abs(low), abs(high))):
        low = high = 0.0 if low <= 0 <= high else values[-1]
    else:
        low, high = _bulk(values)
    spread = high - low or abs(high) or 1.0
    if healthy is not None:
        bounds = [bound for bound in healthy if bound is not None and low - 2 * spread <= bound <= high + 2 * spread]
        low, high = min([low, *bounds]), max([high, *bounds])
    margin = (high - low or abs(high) or 1.0) * 0.05
    bottom = low - margin if low < 0 else max(0.0, low - margin)  # no negative labels for norms and losses
    return bottom, high + margin


def band(healthy: Range | None, low: float, high: float) -> tuple[float, float] | None:
    """Return the part of the healthy range within the limits of an axis, or None if there is none."""
    if healthy is None:
        return None
    start = low if healthy[0] is None else max(low, healthy[0])
    end = high if healthy[1] is None else min(high, healthy[1])
    return (start, end) if start < end else None


def number(value: float) -> str:
    """A number with three significant digits (four from 1,000 to 9,999)."""
    text = f"{value:.{4 if 999.5 <= abs(value) < 9999.5 else 3}g}"
    return text.replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")


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
    """Three lines: name, state, progress and times; a progress bar; method, speeds and memory, or the outcome."""
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
    done = round(min(1.0, live.step / total if total else 0.0) * width)
    bar = Text.assemble(("━" * done, "green"), ("━" * (width - done), "grey30"), no_wrap=True)
    return Text("\n").join([first, bar, _facts(live, width)])


def _spread(left: Text, right: Text, width: int) -> Text:
    left.truncate(max(8, width - right.cell_len - 1), overflow="ellipsis")
    return Text.assemble(left, " " * max(1, width - left.cell_len - right.cell_len), right, no_wrap=True)


def _facts(live: LiveRun, width: int) -> Text:
    outcome, each = None if live.state == "running" else live.outcome(), live.seconds_per_step()
    left = Text(printable(str(live.run.get("method") or "")), style="dim")
    facts = [] if each is None else [f"{each:.3g} s/step"]
    facts += [text.format(live.metrics.latest[name]) for name, text in _SPEEDS if name in live.metrics.latest]
    if outcome is not None:
        left, facts = Text(f"Outcome: {outcome.verdict}"), []
    if live.state == "running" and live.seconds_since_update() > _STALE:
        facts.append(f"no update for {duration(live.seconds_since_update())}")
    facts += [f"{live.corrupted} unreadable lines"] if live.corrupted else []
    return _spread(left, Text("  ".join(facts)), width)


def rollouts(samples: list[Sample], width: int, config: dict[str, Any]) -> RenderableType:
    """The newest samples: each prompt, then the reference above its completions with the terms of their rewards."""
    if not samples:
        text = "No rollouts yet. They are shown unless log_rollouts is none."
        if config and not samples_rollouts(config):
            text = "The method of this run logs no rollouts."
        elif logs_rollouts(config):
            text = "No rollouts yet: waiting for the first step."
        return Text(text, style="dim")
    parts: list[RenderableType] = []
    for (step, place, prompt, reference), found in groupby(samples, key=lambda sample: sample.origin):
        group = list(found)
        parts.append(Text(f"step {step}" + (f", {place}" if place else ""), style="bold"))
        if prompt:
            text = printable(prompt).rstrip("\n")
            end = "\n".join(text.split("\n")[-_PROMPT_LINES:])[-width * _PROMPT_LINES :]
            parts.append(Text(("" if end == text else "... ") + end, style="dim"))
        names = list(dict.fromkeys(name for sample in group for name in sample.terms))
        names = names[: max(1, (width - _MIN_TEXT) // (_TERM + 1))]
        table = Table(expand=True, box=None, padding=(0, 1, 0, 0), show_header=True, header_style="dim")
        table.add_column("reference, then completions", ratio=1, overflow="fold")
        for name in names:
            table.add_column(name.rpartition("/")[2][:_TERM], width=_TERM, justify="right", no_wrap=True)
        if reference is not None:
            table.add_row(Text(_start(reference, width), style="green"))
        for sample in group:
            text = Text(_start(sample.completion, width), style="cyan")
            table.add_row(text, *(value_text(name, sample.terms.get(name)) for name in names))
        parts += [table, Text("")]
    return Group(*parts)


def _start(text: str, width: int) -> str:
    text = printable(text)
    shown = "\n".join(text.split("\n")[:_TEXT_LINES])[: _TEXT_LINES * width]
    return shown + ("" if shown == text else " ...")


def health(live: LiveRun) -> RenderableType:
    """The outcome and the health messages, newest first; the error of a run that failed is above."""
    parts: list[RenderableType] = []
    is_running, found = live.state == "running", live.outcome()
    outcome = [] if found is None else [Text(f"{found}\n", style="dim" if is_running else "")]
    if live.run.get("error"):
        parts.append(Text(f"Error: {printable(str(live.run['error']))}\n", style="red"))
    if not is_running:
        parts += outcome
    for message in reversed(live.health):
        since = message.get("since")
        when = f"step {message.get('step')}" + (f" (since step {since})" if since is not None else "")
        name, text, remedy = (printable(str(message.get(key) or "")) for key in ("name", "message", "remedy"))
        time = f"{clock(message.get('time'))}  {when}  "
        advice = (f"{remedy}\n", "italic dim") if remedy else ""
        parts.append(Text.assemble((time, "dim"), (name, "bold yellow"), f"\n{text}\n", advice))
    if not live.health:
        parts.append(Text("No health messages.\n", style="dim"))
    return Group(*parts, *(outcome if is_running else []))


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
    groups = {"config (not default)": settings_in_effect(live.run), "versions": live.run.get("versions")}
    for title, values in groups.items():
        if isinstance(values, dict) and values:
            table.add_row("")
            table.add_row(Text(title, style="dim not bold"))
            for key, value in values.items():
                table.add_row(Text(printable(str(key))), Text(printable(str(value))))
    return table
