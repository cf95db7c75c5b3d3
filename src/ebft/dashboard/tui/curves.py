"""The curves, in as many columns as fit."""

from __future__ import annotations

from typing import Any

from textual.app import RenderResult
from textual.containers import VerticalScroll
from textual.widget import Widget

from ebft.dashboard.braille import plot
from ebft.dashboard.curves import Curve

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
