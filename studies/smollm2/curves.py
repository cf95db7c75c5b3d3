"""Pictures of stored results: EBFT beside SFT, and the feature-matching loss of rollouts by their length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from intervals import Estimate, difference
from tables import groups_of, label, of_group

# Differences of EBFT from SFT in the picture of the first screen.
PANELS = {
    "ce_loss": "cross-entropy",
    "cfm_loss": "feature-matching loss, 8 tokens",
    "cfm_loss_long": "feature-matching loss, long",
    "pair_distance": "distance of samples",
}
ROLLOUT_PANELS = {
    "cfm_loss": ("feature-matching loss, unbiased", "tokens of the rollout"),
    "rollout_nll_base": ("cross-entropy of rollouts by the pretrained model", "position in the rollout"),
}


def draw_overview(cells: list[dict[str, Any]], places: dict[str, str], path: Path) -> bool:
    """EBFT less SFT with 95% intervals, by metric and place {task-start: title}; False without any or matplotlib."""
    pyplot = _pyplot()
    shown = {place: title for place, title in places.items() if _differences(cells, place)}
    if pyplot is None or not shown:
        return False
    figure, axes = pyplot.subplots(
        1, len(PANELS), figsize=(13, 0.7 + 0.45 * len(shown)), layout="constrained", sharey=True
    )
    for axis, (metric, title) in zip(axes, PANELS.items()):
        for row, place in enumerate(reversed(shown)):
            found = _differences(cells, place).get(metric)
            if found is None:
                continue
            has_seeds = found.count > 1
            half = found.half if has_seeds else found.files
            is_better = (found.mean > 0) == (metric == "pair_distance")
            color = "0.5" if not has_seeds or abs(found.mean) <= half else "tab:green" if is_better else "tab:red"
            axis.errorbar(found.mean, row, xerr=half, fmt="o" if has_seeds else "D", color=color, capsize=3)
        axis.axvline(0, color="0.3", linewidth=0.8)
        axis.set_yticks(range(len(shown)), list(reversed(shown.values())))
        axis.margins(y=0.3)
        _finish(axis, title, "EBFT − SFT")
    figure.suptitle("Green: EBFT better, red: worse, grey: undecided (diamonds: one seed)", fontsize=10)
    return _save(figure, path)


def _differences(cells: list[dict[str, Any]], place: str) -> dict[str, Estimate]:
    """By metric of PANELS how EBFT, mean, differs from SFT."""
    found = {metric: difference(cells, f"{place}-ebft-mean", f"{place}-sft", metric) for metric in PANELS}
    return {metric: value for metric, value in found.items() if value is not None}


def draw_rollouts(cells: list[dict[str, Any]], task: str, start: str, path: Path) -> bool:
    """Where long rollouts drift: feature-matching loss by length, and how well the pretrained model predicts them."""
    pyplot = _pyplot()
    groups = [group for group in groups_of(cells, task, start) if rollouts(cells, group, "cfm_loss")]
    if pyplot is None or not groups:
        return False
    figure, axes = pyplot.subplots(1, len(ROLLOUT_PANELS), figsize=(12, 4), layout="constrained")
    for axis, (name, (title, label_x)) in zip(axes, ROLLOUT_PANELS.items()):
        for group in groups:
            points = rollouts(cells, group, name)
            axis.plot(*zip(*points), label=label(group), linewidth=1.3, marker="." if name == "cfm_loss" else "")
        _finish(axis, title, label_x)
    axes[0].set_xscale("log", base=2)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    figure.suptitle(f"Long rollouts on test documents, {task}, {start}; means over seeds")
    return _save(figure, path)


def rollouts(cells: list[dict[str, Any]], group: str, name: str) -> list[tuple[int, float]]:
    """[(length or position, mean over seeds)] of what changes along a long rollout."""
    return _mean([cell["rollouts"][name] for cell in of_group(cells, group) if "rollouts" in cell])


def _mean(curves: list[list[list[float]]]) -> list[tuple[int, float]]:
    found = [dict(map(tuple, curve)) for curve in curves]
    shared = sorted(set.intersection(*map(set, found))) if found else []
    return [(x, sum(values[x] for values in found) / len(found)) for x in shared]


def _finish(axis: Any, title: str, label_x: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(label_x)
    axis.grid(alpha=0.3)


def _pyplot() -> Any | None:
    """matplotlib without a window; None where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90, metadata={"Software": None})
    _pyplot().close(figure)
    return True
