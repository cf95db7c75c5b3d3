"""Plots of an evaluation: cross-entropy by position, feature-matching loss by length, and histograms of rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ebft.errors import ConfigError
from ebft.tools.evaluation.result import Evaluation, ModelResult

_NLL = {"reference_nll": "reference", "rollout_nll": "own samples", "rollout_nll_base": "own samples, base model"}
_STYLES = ("-", "--", ":")


def save_plots(evaluation: Evaluation, path: str | Path) -> None:
    """Plot the four panels into one image; raises ConfigError if matplotlib is missing or `path` is not writable."""
    plt = _pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(17, 9), layout="constrained")
    _draw_nll(axes[0, 0], evaluation.models)
    _draw_cfm(axes[0, 1], evaluation.models)
    _draw_histogram(axes[1, 0], evaluation.models, "alignment")
    _draw_histogram(axes[1, 1], evaluation.models, "reward")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write --plot {path}: {error}") from error
    finally:
        plt.close(figure)


def check_plots(path: Path) -> None:
    """Raise ConfigError before the evaluation if matplotlib is missing or does not support the format of `path`."""
    figure = _pyplot().figure()
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise ConfigError(f"--plot {path}: unsupported image format; expected one of {', '.join(sorted(known))}.")


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--plot requires matplotlib: pip install 'ebft[plots]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def _draw_nll(axis: Any, models: list[ModelResult]) -> None:
    axis.set(title="Cross-entropy by position in the completion", xlabel="token", ylabel="nats per token")
    for index, result in enumerate(models):
        for style, (curve, label) in zip(_STYLES, _NLL.items()):
            _draw_curve(axis, result, curve, f"{result.model}: {label}", f"C{index}", style)
    _legend(axis)


def _draw_cfm(axis: Any, models: list[ModelResult]) -> None:
    axis.set(title="Feature-matching loss by completion length", xlabel="tokens", ylabel="cfm_loss")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    for index, result in enumerate(models):
        _draw_curve(axis, result, "cfm_loss", result.model, f"C{index}", "-")
    _legend(axis)


def _draw_curve(axis: Any, result: ModelResult, curve: str, label: str, colour: str, style: str) -> None:
    points = result.curves.get(curve, [])
    x = [point["x"] for point in points]
    axis.plot(x, [point["value"] for point in points], style, color=colour, label=label)
    bounded = [point for point in points if point["interval"] is not None]
    low, high = [point["interval"][0] for point in bounded], [point["interval"][1] for point in bounded]
    axis.fill_between([point["x"] for point in bounded], low, high, color=colour, alpha=0.12, linewidth=0)


def _draw_histogram(axis: Any, models: list[ModelResult], name: str) -> None:
    axis.set(title=f"{name.capitalize()} of individual samples", xlabel=name, ylabel="fraction of samples")
    for index, result in enumerate(models):
        if name in result.histograms:
            histogram = result.histograms[name]
            axis.stairs(histogram["shares"], histogram["edges"], color=f"C{index}", label=result.model)
    _legend(axis)


def _legend(axis: Any) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize="x-small", framealpha=0.6, loc="upper left", bbox_to_anchor=(1.0, 1.0))
