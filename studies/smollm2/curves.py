"""Pictures of stored results: EBFT beside SFT, the loss of rollouts by their length, and where gradients point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from intervals import Estimate, difference
from metrics import MAIN, is_better_higher
from tables import SIGNAL_STEP, groups_of, label, of_group, seeds_of, step_cosine

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
        1, len(MAIN), figsize=(14, 0.9 + 0.55 * len(shown)), layout="constrained", sharey=True
    )
    for axis, title in zip(axes, MAIN):
        for row, place in enumerate(reversed(shown)):
            if title not in _differences(cells, place):
                continue
            metric, found = _differences(cells, place)[title]
            has_seeds = found.count > 1
            half = found.half if has_seeds else found.files
            is_better = (found.mean > 0) == is_better_higher(metric)
            color = "0.5" if not has_seeds or abs(found.mean) <= half else "tab:green" if is_better else "tab:red"
            axis.errorbar(found.mean, row, xerr=half, fmt="o" if has_seeds else "D", color=color, capsize=3)
        axis.axvline(0, color="0.3", linewidth=0.8)
        runs = [f"{title}\n{trained(cells, place)}" for place, title in shown.items()]
        axis.set_yticks(range(len(shown)), runs[::-1])
        axis.margins(y=0.3)
        _finish(axis, title, "EBFT − SFT")
    one_seed = any(found.count == 1 for place in shown for _, found in _differences(cells, place).values())
    diamonds = " (diamonds: one seed)" if one_seed else ""
    figure.suptitle(f"Green: EBFT better, red: worse, grey: undecided{diamonds}", fontsize=10)
    return _save(figure, path)


def _differences(cells: list[dict[str, Any]], place: str) -> dict[str, tuple[str, Estimate]]:
    """By heading of MAIN, the metric and how EBFT, mean, differs from SFT in it."""
    sides = f"{place}-ebft-mean", f"{place}-sft"
    found = [
        (title, metric, difference(cells, *sides, metric)) for title, metrics in MAIN.items() for metric in metrics
    ]
    return {title: (metric, value) for title, metric, value in found if value is not None}


def trained(cells: list[dict[str, Any]], place: str) -> str:
    """How many seeds and steps EBFT, mean, has in a place."""
    group = f"{place}-ebft-mean"
    steps = sorted({cell["cost"]["steps"] for cell in of_group(cells, group)})
    seeds = len(seeds_of(cells, group))
    return f"{seeds} seed{'s' if seeds > 1 else ''}, {' or '.join(map(str, steps))} steps"


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


def draw_signal(found: dict[str, Any], path: Path) -> bool:
    """How much of a step goes where the held-out loss falls, by samples, length and whitening (gradient_signal.py).

    A step of 16 documents, and one with as many rollouts as 16 documents have with 4 samples each.
    """
    pyplot = _pyplot()
    if pyplot is None or not found["lengths"]:
        return False
    figure, rows = pyplot.subplots(
        2, len(found["lengths"]), figsize=(12, 6), layout="constrained", sharey=True, squeeze=False
    )
    for axes, title in zip(rows, ("16 documents", "as many rollouts")):
        for axis, (length, values) in zip(axes, found["lengths"].items()):
            lines: dict[str, list[tuple[int, float]]] = {}
            for name, value in values.items():
                space, samples = name.split(", n = ")
                documents = SIGNAL_STEP if title == "16 documents" else 4 * SIGNAL_STEP / int(samples)
                lines.setdefault(space, []).append((int(samples), step_cosine(value, documents)))
            for space, points in lines.items():
                axis.plot(*zip(*sorted(points)), label=space, marker=".")
            axis.axhline(0, color="0.3", linewidth=0.8)
            axis.set_xscale("log", base=2)
            _finish(axis, f"{length} tokens, {title}", "samples of a prompt")
    rows[0][0].legend(frameon=False, fontsize=8)
    figure.supylabel("cosine of a step with the held-out gradient", fontsize=10)
    return _save(figure, path)


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
