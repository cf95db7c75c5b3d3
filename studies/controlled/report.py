"""The tables of the controlled study, which are printed, and results/figure.png, from the files in results/."""

from __future__ import annotations

import json
import statistics
from typing import Any

from cells import HERE

RESULTS = HERE / "results"
METRICS = {"kl": "KL, nats", "valid": "valid", "coverage": "coverage KL", "until_error": "words to error"}
METRICS |= {"cfm_loss_change": "change of CFM loss"}
DRAWN = {"start": "start", "sft-rate0.1": "SFT", "sft-decay": "SFT, decaying", "sft-tenth-rate0.1": "SFT, a tenth"}
DRAWN |= {"ebft-rate0.1": "EBFT, rate 3e-5", "ebft": "EBFT, 3e-4", "ebft-ce_0.2": "EBFT, ce_coef 0.2"}
DRAWN |= {"ebft-whitened": "EBFT, whitened", "rlvr": "RLVR"}
TITLES = {"shifted-small": "new texts", "moved-small": "200 texts", "brackets-small": "brackets, learned before"}
TITLES |= {"traces-small": "traces, learned before"}
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
    """For each source: KL at temperature 1, and validity against coverage over temperatures."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, len(TITLES), figsize=(3.6 * len(TITLES), 5.6), squeeze=False)
    for (bars, lines), (place, title) in zip(panels.T, TITLES.items()):
        for number, (name, label) in enumerate(DRAWN.items()):
            if seeds := groups.get(f"{place}-{name}"):
                bars.barh(label, statistics.fmean(seed["kl"] for seed in seeds), color=f"C{number}")
                lines.plot(*zip(*curve(seeds)), "o-", color=f"C{number}", markersize=3)
        bars.set(title=title, xlabel="KL(data || model), nats a text", xscale="log", xlim=(0.1, 100))
        bars.invert_yaxis()
        lines.set(xlabel="KL of modes (less is better)", ylabel="share of valid samples", xscale="log")
        lines.minorticks_off()
    figure.tight_layout()
    figure.savefig(RESULTS / "figure.png", dpi=80)


if __name__ == "__main__":
    main()
