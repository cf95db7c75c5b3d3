"""Plots of a stored benchmark, from its JSON alone: `python -m benchmarks.plots FILE.json` writes FILE.png."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402 (after the choice of a backend that needs no screen)

COLOURS = {"ours": "tab:blue", "axolotl": "tab:orange"}
PHASE_COLOURS = {"rollout": "#1b4f72", "features": "#2e86c1", "forward": "#85c1e9", "backward": "#d6eaf8"}


def draw(results: Path) -> Path:
    """Time by length, share of the phases, and memory, of the JSON file at `results`; returns the picture's path."""
    found = json.loads(results.read_text(encoding="utf-8"))
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    card, lengths = found["card"], found["lengths"]
    _sides(axes[0], lengths, "step")
    axes[0].plot(*_series(lengths, "ours", "floor"), "--", color="0.5", label="our matrix products alone")
    _by_length(axes[0], lengths, "seconds of a step")
    _phases(axes[1], lengths)
    _sides(axes[2], lengths, "peak_mib")
    _by_length(axes[2], lengths, "peak MiB that a step needs")
    figure.suptitle(f"One strided EBFT step: {card['model']}, {card['dtype']}\n{card['device']}", fontsize=10)
    picture = results.with_suffix(".png")
    figure.savefig(picture, dpi=130)
    pyplot.close(figure)
    return picture


def _phases(axis: Any, lengths: list[dict[str, Any]]) -> None:
    """A bar for each length and side: shares, because seconds of the two differ too much for one axis."""
    rows = [
        (result["length"], side, result["sides"][side])
        for result in lengths
        for side in COLOURS
        if result["sides"].get(side, {}).get("rounds")
    ]
    bottom = [0.0] * len(rows)
    for phase, colour in PHASE_COLOURS.items():
        shares = [row[phase] / row["step"] for _, _, row in rows]
        axis.bar(range(len(rows)), shares, bottom=bottom, color=colour, edgecolor="0.4", linewidth=0.5, label=phase)
        bottom = [below + share for below, share in zip(bottom, shares)]
    names = [f"{tokens}\n{side}\n{row['step']:.3g} s" for tokens, side, row in rows]
    axis.set_xticks(range(len(rows)), names, rotation=90, fontsize=8)
    axis.set_ylabel("share of the step")
    axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)


def _sides(axis: Any, lengths: list[dict[str, Any]], name: str) -> None:
    """A line for each side that has values."""
    for side, colour in COLOURS.items():
        tokens, values = _series(lengths, side, name)
        if values:
            axis.plot(tokens, values, "o-", color=colour, label=side)


def _series(lengths: list[dict[str, Any]], side: str, name: str) -> tuple[list[int], list[float]]:
    """The lengths at which a side has a value, and the values."""
    values = {result["length"]: result["sides"].get(side, {}).get(name) for result in lengths}
    values = {length: value for length, value in values.items() if value is not None}
    return list(values), list(values.values())


def _by_length(axis: Any, lengths: list[dict[str, Any]], label: str) -> None:
    ticks = [result["length"] for result in lengths]
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set_xlabel("document tokens")
    axis.set_ylabel(label)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=9)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    print(draw(parser.parse_args().results))
