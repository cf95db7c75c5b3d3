"""Pictures of stored results: training curves, and the feature-matching loss of rollouts by their length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tables import groups_of, label, of_group

PANELS = {
    "ebft/alignment": "alignment of rollouts",
    "ebft/cfm_loss": "feature-matching loss, plug-in",
    "ebft/diversity": "similarity of rollouts",
    "ebft/ce_loss": "cross-entropy of the reference",
}
ROLLOUT_PANELS = {
    "cfm_loss": ("feature-matching loss, unbiased", "tokens of the rollout"),
    "rollout_nll_base": ("cross-entropy of rollouts by the pretrained model", "position in the rollout"),
}


def draw_training(cells: list[dict[str, Any]], task: str, start: str, path: Path) -> bool:
    """The curves of the EBFT runs of a task and start; False where there is nothing to draw, or no matplotlib."""
    pyplot = _pyplot()
    groups = [group for group in groups_of(cells, task, start) if "-ebft-" in group]
    if pyplot is None or not any(logged(cells, group, metric) for group in groups for metric in PANELS):
        return False
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(17, 4), layout="constrained")
    for axis, (metric, title) in zip(axes, PANELS.items()):
        for group in groups:
            points = logged(cells, group, metric)
            if points:
                axis.plot(*zip(*points), label=label(group), linewidth=1.3)
        _finish(axis, title, "optimizer step")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    figure.suptitle(f"EBFT, {task}, {start}; means over seeds. Whitening, pooling and temperature change the scale")
    return _save(figure, path)


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


def logged(cells: list[dict[str, Any]], group: str, metric: str) -> list[tuple[int, float]]:
    """[(step, mean over seeds)] of a logged metric, at the steps that every seed logged."""
    return _mean([cell["log"][metric] for cell in of_group(cells, group) if metric in cell.get("log", {})])


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
