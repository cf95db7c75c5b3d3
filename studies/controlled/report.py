"""The tables of the controlled study, which are printed, and results/frontier.png, from the files in results/."""

from __future__ import annotations

import json
import statistics
from typing import Any

from cells import HERE

RESULTS = HERE / "results"
METRICS = {"kl": "KL, nats", "valid": "valid", "coverage": "coverage KL", "until_error": "words to error"}
METRICS |= {"cfm_loss_change": "change of CFM loss"}
DRAWN = ("start", "sft", "sft-decay", "sft-tenth", "ebft", "ebft-ce_0.2", "ebft-whitened", "rlvr")
Results = dict[str, list[dict[str, Any]]]  # of each group of runs that differ by seed


def main() -> None:
    """Print the tables and draw the figure."""
    groups = read()
    for place in sorted({"-".join(name.split("-")[:2]) for name in groups}):
        print(f"\n## {place}\n\n{table(groups, place)}")
    draw(groups)


def read() -> Results:
    """The results by group, in the order of their names."""
    groups: Results = {}
    for path in sorted(RESULTS.glob("*.json")):
        groups.setdefault(path.stem.rpartition("-seed")[0], []).append(json.loads(path.read_text(encoding="utf-8")))
    return groups


def table(groups: Results, place: str) -> str:
    """A row for each group of a source and size: means over seeds, and half of their range."""
    lines = [f"| run | seeds | {' | '.join(METRICS.values())} | beyond |", "| --- " * (len(METRICS) + 3) + "|"]
    baselines = [seeds for name, seeds in groups.items() if name.startswith((f"{place}-sft", f"{place}-start"))]
    for name, seeds in groups.items():
        if name.startswith(f"{place}-"):
            cells = [spread([seed[key] for seed in seeds if seed.get(key) is not None]) for key in METRICS]
            won = "" if "-ebft" not in name and "-structured" not in name else wins(seeds, baselines)
            lines.append(f"| {name.removeprefix(f'{place}-')} | {len(seeds)} | {' | '.join(cells)} | {won} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """Mean ± half of the range; empty without values."""
    half = (max(values) - min(values)) / 2 if values else 0
    return (f"{statistics.fmean(values):.4g}" if values else "") + (f" ± {half:.2g}" if half else "")


def wins(seeds: list[dict[str, Any]], baselines: list[list[dict[str, Any]]]) -> str:
    """At how many temperatures neither the start nor an SFT run has, at any one, as many valid samples and coverage."""
    others = [point for each in baselines for point in curve(each)]
    worse = lambda one, other: other[0] <= one[0] and other[1] >= one[1]
    points = curve(seeds)
    return f"{sum(not any(worse(one, other) for other in others) for one in points)} of {len(points)}"


def curve(seeds: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """(coverage KL, valid) at each temperature, means over seeds."""
    temperatures = seeds[0]["temperatures"]
    mean = lambda key, name: statistics.fmean(seed["temperatures"][key][name] for seed in seeds)
    return [(mean(key, "coverage"), mean(key, "valid")) for key in temperatures]


def draw(groups: Results) -> None:
    """A panel for each source and size: validity against coverage over temperatures."""
    from matplotlib import pyplot

    places = sorted({"-".join(name.split("-")[:2]) for name in groups})
    figure, panels = pyplot.subplots(1, len(places), figsize=(4 * len(places), 3.6), squeeze=False)
    for panel, place in zip(panels[0], places):
        for number, name in enumerate(DRAWN):
            if seeds := groups.get(f"{place}-{name}"):
                coverage, valid = zip(*curve(seeds))
                panel.plot(coverage, valid, "o-", color=f"C{number}", markersize=3, label=name)
        panel.legend(fontsize=6)
        panel.set(title=place, xlabel="KL of modes (less is better)", xscale="log")
    panels[0][0].set_ylabel("share of valid samples")
    figure.tight_layout()
    figure.savefig(RESULTS / "frontier.png", dpi=110)


if __name__ == "__main__":
    main()
