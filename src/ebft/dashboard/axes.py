"""The vertical axis of a plot: its limits, and where the healthy range is on it."""

from __future__ import annotations

from ebft.dashboard.curves import Range


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
