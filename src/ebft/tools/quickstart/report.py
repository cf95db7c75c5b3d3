"""What the run found out: the table on the screen, summary.json and curves.png."""

import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ebft.config.reference import changed_keys
from ebft.config.schema import RunConfig
from ebft.tools.quickstart.measure import changes, means
from ebft.tools.quickstart.run import console

NOT_COMPARED = "cfm_loss_whitened"  # whitened by each model's own samples
# Metric, which way is better ("" where neither is).
METRICS = (
    ("cfm_loss", "down"),
    ("alignment", "up"),
    ("diversity", ""),
    ("ce_loss", "down"),
    ("perplexity", "down"),
    ("cfm_loss_plugin", "down"),
    (NOT_COMPARED, ""),
)
PANELS = (
    ("ebft/alignment", "alignment (wanted: up)"),
    ("ebft/cfm_loss", "feature-matching loss, plug-in (wanted: down)"),
    ("ebft/mean_reward", "reward (wanted: up)"),
    ("ebft/ce_loss", "cross-entropy (wanted: down)"),
)
# Each step whitens the features by its own samples, so values of different steps cannot be compared.
WHITENED_PANELS = (
    ("ebft/alignment", "alignment, whitened by each step's samples"),
    ("ebft/cfm_loss", "feature-matching loss, plug-in, whitened in the same way"),
    ("ebft/mean_reward", "reward, whitened in the same way"),
    PANELS[-1],
)
PANELS_OF_SFT = (("loss", "cross-entropy (wanted: down)"), ("grad_norm", "gradient norm"))


def result_table(before: list[dict[str, float]], after: list[dict[str, float]]) -> Table:
    """Each metric before and after, and its change with the standard error over groups of documents."""
    caption = "change ± its standard error over groups of documents"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    table.add_column("held out", no_wrap=True)
    for column in ("before", "after", "change", "wanted", ""):
        table.add_column(column, justify="right", no_wrap=True)
    old, new = means(before), means(after)
    spread = {name: error for name, _, error in changes(before, after)}
    for name, wanted in METRICS:
        change = new[name] - old[name]
        verdict = _verdict(change, spread[name], wanted)
        shown = "" if name == NOT_COMPARED else f"{change:+.2g} ± {spread[name]:.1g}"
        table.add_row(name, f"{old[name]:.4g}", f"{new[name]:.4g}", shown, wanted, verdict)
    return table


def _verdict(change: float, error: float, wanted: str) -> str:
    if not wanted:
        return ""
    if math.isnan(error) or abs(change) < 2 * error:
        return "[yellow]in noise"
    return "[green]better" if (change > 0) == (wanted == "up") else "[red]worse"


def save_curves(log_history: list[dict[str, float]], path: Path, title: str, whitened: bool) -> None:
    """The training curves of one run: every logged value in grey, their running mean in colour."""
    try:
        import matplotlib
    except ImportError:
        console.print("No curves.png, since matplotlib is not installed: pip install 'ebft[plots]'", markup=False)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = panels_of(log_history, whitened)
    rows = len(panels) // 2
    shape = {"squeeze": False, "figsize": (10, 3.25 * rows), "sharex": True, "layout": "constrained"}
    figure, axes = pyplot.subplots(rows, 2, **shape)
    for axis, (metric, label) in zip(axes.flat, panels):
        logged = [(entry["step"], entry[metric]) for entry in log_history if metric in entry]
        steps, values = zip(*logged)
        axis.plot(steps, values, color="0.75", linewidth=1, label="each log")
        axis.plot(steps, running_mean(values), color="tab:blue", linewidth=2, label="running mean")
        axis.set_title(label, fontsize=11)
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("optimizer step")
    axes[0, 0].legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def panels_of(log_history: list[dict[str, float]], whitened: bool) -> tuple[tuple[str, str], ...]:
    """The metrics of a run that are drawn, with their titles; `whitened`: of rewards with use_whitening."""
    if not any(PANELS[0][0] in entry for entry in log_history):
        return PANELS_OF_SFT
    return WHITENED_PANELS if whitened else PANELS


def running_mean(values: tuple[float, ...], width: int = 9) -> list[float]:
    """The mean of the `width` values around each one, of fewer at both ends."""
    half = width // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def machine() -> dict[str, Any]:
    """What the numbers depend on beside the seed."""
    packages = ("torch", "transformers", "peft", "ebft")
    return {
        "cpu_count": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The checked-out commit; None outside a git checkout or without git."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def save_summary(
    path: Path,
    seed: int,
    before: list[dict[str, float]],
    after: list[dict[str, float]],
    configs: dict[str, RunConfig],
    samples: Iterable[dict[str, str]],
    seconds: dict[str, float],
) -> None:
    """Write everything that the run found out, and what it depends on, as one JSON object."""
    summary = {
        "seed": seed,
        "machine": machine(),
        "before": means(before),
        "after": means(after),
        "change_standard_error": {name: error for name, _, error in changes(before, after)},
        "samples": list(samples),
        "config": {name: dict(changed_keys(config)) for name, config in configs.items()},
        "seconds": seconds,
    }
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
