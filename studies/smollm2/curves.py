"""Training curves of stored results, as pictures: means over seeds of the values that the runs logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cells import CENTRE
from tables import groups_of, label

PANELS = {
    "ebft/alignment": "alignment of rollouts",
    "ebft/cfm_loss": "feature-matching loss, plug-in",
    "ebft/diversity": "similarity of rollouts",
    "ebft/ce_loss": "cross-entropy of the reference",
}

ROLLOUT_PANELS = {
    "cfm_loss": ("feature-matching loss, unbiased", "tokens of the rollout"),
    "rollout_nll_base": ("cross-entropy of rollouts by the base model", "position in the rollout"),
}


def draw(cells: list[dict[str, Any]], task: str, start: str, path: Path) -> bool:
    """The curves of the EBFT runs of a task and start; False where there is nothing to draw, or no matplotlib."""
    pyplot = _pyplot()
    groups = [group for group in groups_of(cells, task, start) if "-ebft-" in group]
    if pyplot is None or not any(curve(cells, group, metric) for group in groups for metric in PANELS):
        return False
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(17, 4), layout="constrained")
    for axis, (metric, title) in zip(axes, PANELS.items()):
        for group in groups:
            points = curve(cells, group, metric)
            if points:
                axis.plot(*zip(*points), label=label(group), linewidth=1.3)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.3)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center", frameon=False, fontsize=8)
    scales = "Runs that differ in whitening, pooling or temperature are not on one scale"
    figure.suptitle(f"EBFT, {task}, from {start}; means over seeds. {scales}")
    return _save(figure, path)


def draw_rollouts(cells: list[dict[str, Any]], task: str, start: str, path: Path) -> bool:
    """Where rollouts drift: feature-matching loss by length, and how well the base model predicts each token."""
    pyplot = _pyplot()
    is_shown = lambda group: "-ebft-" not in group or group.endswith(f"-ebft-{CENTRE}")
    groups = [group for group in groups_of(cells, task, start) if is_shown(group)]
    if pyplot is None or not groups:
        return False
    figure, axes = pyplot.subplots(1, len(ROLLOUT_PANELS), figsize=(11, 3.6), layout="constrained")
    for axis, (name, (title, label_x)) in zip(axes, ROLLOUT_PANELS.items()):
        for group in groups:
            found = [dict(map(tuple, cell["rollouts"][name])) for cell in cells if cell["cell"]["group"] == group]
            shared = sorted(set.intersection(*map(set, found)))
            points = [(x, sum(values[x] for values in found) / len(found)) for x in shared]
            axis.plot(*zip(*points), label=label(group), linewidth=1.3, marker=".")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(label_x)
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    figure.suptitle(f"Rollouts on test documents, {task}, from {start}; means over seeds")
    return _save(figure, path)


def curve(cells: list[dict[str, Any]], group: str, metric: str) -> list[tuple[int, float]]:
    """[(step, mean over seeds)] of a logged metric, at the steps that every seed logged."""
    logs = [
        dict(map(tuple, cell["log"][metric]))
        for cell in cells
        if cell["cell"]["group"] == group and metric in cell.get("log", {})
    ]
    steps = sorted(set.intersection(*map(set, logs))) if logs else []
    return [(step, sum(log[step] for log in logs) / len(logs)) for step in steps]


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
    figure.savefig(path, dpi=110, metadata={"Software": None})
    _pyplot().close(figure)
    return True
