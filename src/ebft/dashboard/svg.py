"""Curves as inline SVG."""

from __future__ import annotations

from ebft.dashboard.axes import band, limits, number
from ebft.dashboard.braille import columns_of
from ebft.dashboard.curves import Curve, range_text
from ebft.dashboard.text import html_text

COLORS = ("#0b7285", "#ae3ec9", "#e67700", "#2b8a3e", "#c92a2a", "#1864ab")
_WIDTH, _HEIGHT = 420, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 8, 8, 22  # margins of the axes
_COLUMNS = 360  # points of a line at most


def figure(curve: Curve) -> str:
    """A curve as a `<figure>` with a caption: its name, last values, desired direction and healthy range."""
    points = [value for series in curve.series.values() for value in series.values]
    steps = [step for series in curve.series.values() for step in series.steps]
    if not points:
        return ""
    low, high = limits(points, curve.healthy)
    first, last = min(steps), max(steps)
    shapes = [_band(curve, low, high), _axes(low, high, first, last)]
    for index, series in enumerate(curve.series.values()):
        columns = columns_of(series, min(_COLUMNS, max(2, len(series.steps))), first, last)
        shapes.append(_line(columns, low, high, COLORS[index % len(COLORS)]))
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(shapes)}</svg>'
    return f"<figure>{_caption(curve)}{svg}</figure>"


def _caption(curve: Curve) -> str:
    values = []
    for index, (label, value) in enumerate(curve.values().items()):
        name = "" if label == curve.title else f"{html_text(label)} "
        values.append(f'<span style="color:{COLORS[index % len(COLORS)]}">{name}{number(value)}</span>')
    wanted = {"^": " (higher is better)", "v": " (lower is better)"}.get(curve.wanted, "")
    healthy = f", usual {html_text(range_text(curve.healthy))}" if curve.healthy is not None else ""
    return f"<figcaption><b>{html_text(curve.title)}</b> {' '.join(values)}{wanted}{healthy}</figcaption>"


def _x(fraction: float) -> float:
    return round(_LEFT + fraction * (_WIDTH - _LEFT - _RIGHT), 1)


def _y(value: float, low: float, high: float) -> float:
    return round(_TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM), 1)


def _band(curve: Curve, low: float, high: float) -> str:
    shaded = band(curve.healthy, low, high)
    if shaded is None:
        return ""
    top, bottom = _y(shaded[1], low, high), _y(shaded[0], low, high)
    return f'<rect class="healthy" x="{_x(0)}" y="{top}" width="{_x(1) - _x(0):.1f}" height="{bottom - top:.1f}"/>'


def _axes(low: float, high: float, first: float, last: float) -> str:
    bottom = _HEIGHT - _BOTTOM
    labels = [
        f'<text x="{_LEFT - 5}" y="{_TOP + 8}" text-anchor="end">{number(high)}</text>',
        f'<text x="{_LEFT - 5}" y="{bottom}" text-anchor="end">{number(low)}</text>',
        f'<text x="{_LEFT}" y="{_HEIGHT - 6}">{first:.0f}</text>',
        f'<text x="{_x(1)}" y="{_HEIGHT - 6}" text-anchor="end">step {last:.0f}</text>',
    ]
    return f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{_x(1)}"/>' + "".join(labels)


def _line(columns: list[float | None], low: float, high: float, color: str) -> str:
    count = max(1, len(columns) - 1)
    points = [(index / count, value) for index, value in enumerate(columns) if value is not None]
    if len(points) == 1:
        return f'<circle cx="{_x(points[0][0])}" cy="{_y(points[0][1], low, high)}" r="2.5" fill="{color}"/>'
    path = " ".join(f"{_x(at)},{_y(value, low, high)}" for at, value in points)
    return f'<polyline points="{path}" stroke="{color}"/>'
