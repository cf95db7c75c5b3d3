"""Line plots in a terminal, drawn with braille characters: two by four dots per character."""

from __future__ import annotations

from itertools import groupby

from rich.style import Style
from rich.text import Text

from ebft.tools.dashboard.live import Curve, Range, Series, range_text

COLORS = ("cyan", "magenta", "yellow", "green", "red", "blue")
HEALTHY = "on #12351f"  # background of the healthy range
_LABEL = 10  # characters of the labels of the vertical axis
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a character, by column and row


def plot(curve: Curve, width: int, height: int) -> Text:
    """Draw a curve in `height` lines of `width` characters: a title, the plot, and the steps below it."""
    rows, columns = height - 2, width - _LABEL
    title = title_of(curve, width)
    points = [value for series in curve.series.values() for value in series.values]
    if rows < 1 or columns < 4 or not points:
        return title
    low, high = limits(points, curve.healthy)
    steps = [step for series in curve.series.values() for step in series.steps]
    canvas = _Canvas(columns, rows)
    for number_of, series in enumerate(curve.series.values()):
        canvas.draw(columns_of(series, columns * 2, min(steps), max(steps)), low, high, number_of)
    lines = [title, *_rows(canvas, curve, low, high), _step_axis(min(steps), max(steps), width)]
    return Text("\n").join(lines)


def title_of(curve: Curve, width: int) -> Text:
    """The name, the last values and the healthy range of a curve in one line; the first value outside is in red."""
    text = Text(curve.title, style="bold", no_wrap=True)
    for index, (label, value) in enumerate(curve.values().items()):
        color = COLORS[index % len(COLORS)]
        outside = curve.healthy is not None and not _is_inside(value, curve.healthy)
        name = "" if label == curve.title else f"{label} "
        text.append(f"  {name}{number(value)}", style="not bold red" if outside else f"not bold {color}")
    if curve.wanted:
        text.append(f" {curve.wanted}", style="not bold dim")
    if curve.healthy is not None:
        text.append(f"  [{range_text(curve.healthy)}]", style="not bold green")
    text.truncate(width, overflow="ellipsis")
    return text


def _is_inside(value: float, healthy: tuple[float | None, float | None]) -> bool:
    low, high = healthy
    return (low is None or value >= low) and (high is None or value <= high)


def columns_of(series: Series, count: int, first: float, last: float) -> list[float | None]:
    """Means of the values of a series in `count` equal ranges of steps from `first` to `last`; None where none is."""
    sums, counts = [0.0] * count, [0] * count
    scale = (count - 1) / (last - first) if last > first else 0.0
    for step, value in zip(series.steps, series.values):
        column = min(count - 1, max(0, round((step - first) * scale)))
        sums[column] += value
        counts[column] += 1
    return [total / size if size else None for total, size in zip(sums, counts)]


class _Canvas:
    def __init__(self, columns: int, rows: int) -> None:
        self.rows, self.columns = rows, columns
        self.dots = [[0] * columns for _ in range(rows)]
        self.owner = [[0] * columns for _ in range(rows)]

    def draw(self, values: list[float | None], low: float, high: float, owner: int) -> None:
        """Draw a line through the values, one per column of dots, across columns without one."""
        previous: tuple[int, int] | None = None
        for x, value in enumerate(values):
            if value is None:
                continue
            y = round((high - value) / (high - low) * (self.rows * 4 - 1))
            for between_x, between_y in _line(previous or (x, y), (x, y)):
                self._set(between_x, between_y, owner)
            previous = (x, y)

    def _set(self, x: int, y: int, owner: int) -> None:
        self.dots[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
        self.owner[y // 4][x // 2] = owner


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    (x0, y0), (x1, y1) = start, end
    length = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [(round(x0 + (x1 - x0) * t / length), round(y0 + (y1 - y0) * t / length)) for t in range(length + 1)]


def _rows(canvas: _Canvas, curve: Curve, low: float, high: float) -> list[Text]:
    """The lines of the plot with the labels of the vertical axis and the healthy range as background."""
    shaded = band(curve.healthy, low, high)
    lines = []
    for row in range(canvas.rows):
        middle = high - (row + 0.5) / canvas.rows * (high - low)
        label = number(high if row == 0 else low) if row in (0, canvas.rows - 1) else ""
        line = Text(f"{label:>{_LABEL - 1}} ", style="dim", no_wrap=True)
        background = Style.parse(HEALTHY) if shaded and shaded[0] <= middle <= shaded[1] else Style()
        cells = zip(canvas.dots[row], canvas.owner[row])
        for owner, found in groupby(cells, key=lambda cell: cell[1]):
            text = "".join(chr(0x2800 + dots) if dots else " " for dots, _ in found)
            line.append(text, style=Style(color=COLORS[owner % len(COLORS)], dim=False) + background)
        lines.append(line)
    return lines


def _step_axis(first: float, last: float, width: int) -> Text:
    start, end = f"{first:.0f}", f"step {last:.0f}"
    space = max(1, width - _LABEL - len(start) - len(end))
    return Text(" " * _LABEL + start + " " * space + end, style="dim", no_wrap=True)


def limits(values: list[float], healthy: Range | None) -> tuple[float, float]:
    """Return the lowest and the highest value of the axis for `values` (at least one).

    A bound of the healthy range is included if it is not further away than twice the spread of the values.
    """
    low, high = min(values), max(values)
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
    """A number with three significant digits (four from 1,000)."""
    size = abs(value)
    if size == 0:
        return "0"
    if not 9.995e-4 <= size < 9999.5:
        return f"{value:.2e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    # Half a unit of the last digit below a power of ten, so that 0.9996 is 1.00 and not 1.000.
    bounds = ((9.995e-3, 5), (9.995e-2, 4), (0.9995, 3), (9.995, 2), (99.95, 1))
    digits = next((digits for bound, digits in bounds if size < bound), 0)
    return f"{value:.{digits}f}"
