"""Results of an evaluation: metrics, intervals, differences and curves of each model, as JSON."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ebft.errors import ConfigError, doing
from ebft.files import write_text
from ebft.methods.method import selecting_keys
from ebft.scores import CROSS_ENTROPY, CURVE, Scores, interval
from ebft.tools.dashboard.live import LOWER_IS_BETTER, NOT_COMPARABLE
from ebft.tools.evaluation.notes import FEWEST_DOCUMENTS
from ebft.tools.evaluation.task import Settings

if TYPE_CHECKING:
    from ebft.run.config.schema import RunConfig

HISTOGRAM_BINS = 40
_WIDTH = 10_000  # characters of a line: tables are as wide as their cells


@dataclass
class ModelResult:
    """The results of one model.

    `intervals` are central bootstrap intervals over documents, widened for few documents. `differences` and their
    intervals are relative to the first model and paired by document; metrics that cannot be compared between models
    have none. `documents` is the number of documents that a metric applies to. `curves` contain points (position or
    length, value, interval), `histograms` the bin edges and the fraction of samples in each bin. `per_document`, if
    enabled in the config, contains for each metric the documents (indices into the held-out data) with the sum and the
    weight that each adds to the mean.
    """

    model: str
    metrics: dict[str, float]
    intervals: dict[str, list[float]] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    difference_intervals: dict[str, list[float]] = field(default_factory=dict)
    documents: dict[str, int] = field(default_factory=dict)
    curves: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    histograms: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    per_document: dict[str, dict[str, list]] = field(default_factory=dict)


@dataclass
class Evaluation:
    """Results of several models on the same held-out documents, in the same feature space.

    `notes` are warnings about what they can show, such as documents that a model was trained on.
    """

    models: list[ModelResult]
    settings: dict[str, Any]
    machine: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """The tables of metrics and of differences, and the notes."""
        text = StringIO()
        console = Console(width=_WIDTH, file=text, color_system=None)
        for table in filter(None, (self.table(), self.differences_table())):
            console.print(table)
        for note in self.notes:
            console.print(note, markup=False, soft_wrap=True)
        return "\n".join(line.rstrip() for line in text.getvalue().rstrip().split("\n"))

    def to_dict(self) -> dict[str, Any]:
        """Return all results as JSON-serialisable types."""
        return asdict(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all results as JSON, atomically unless `path` is not a regular file, such as /dev/stdout."""
        path, text = Path(path).resolve(), json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        with doing(f"writing {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not path.is_file():
                path.write_text(text, encoding="utf-8")
            else:
                write_text(path, text, is_flushed=False)

    def table(self) -> Table:
        """Return a table of the metrics of each model with intervals.

        A star marks metrics whose difference from the first model has an interval that excludes 0. Intervals over fewer
        than 8 documents are not reliable enough for that, so there are no stars then, also of a metric that applies to
        fewer.
        """
        settings, plural = self.settings, lambda number, noun: f"{number:,} {noun}{'' if number == 1 else 's'}"
        counts = f"{plural(settings['documents'], 'document')}, {plural(settings['samples'], 'sample')}"
        legend = "^ higher is better, v lower is better; brackets: interval over documents"
        legend += "; * differs from the first model" if len(self.models) > 1 and self._has_stars else ""
        return self._table(f"{counts} at temperature {settings['temperature']:g}", legend)

    def differences_table(self) -> Table | None:
        """Return a table of the differences from the first model with intervals, paired by document.

        None if there is a single model. Metrics that cannot be compared between models are left out.
        """
        caption = "brackets: interval of the difference, paired by document"
        caption += "; * excludes 0" if self._has_stars else ""
        return self._table("Differences from {}", caption, of_difference=True) if len(self.models) > 1 else None

    @property
    def _has_stars(self) -> bool:
        return self.settings["documents"] >= FEWEST_DOCUMENTS

    def _table(self, title: str, caption: str, of_difference: bool = False) -> Table:
        """A table with a column for each model; {} in the title is the first one, which has no differences."""
        models = [result.model for result in self.models]
        short = [str(Path(*Path(model).parts[-2:])) for model in models]
        headings, results = short if len(set(short)) == len(models) else models, self.models[of_difference:]
        found = {name for result in results for name in (result.differences if of_difference else result.metrics)}
        others = sorted(found - {*ORDER, "alignment_pass@1"})  # alignment_pass@1 is equal to alignment
        table = Table("metric", *headings[of_difference:], title=title.format(headings[0]), caption=caption)
        for name in (*(name for name in ORDER if name in found), *others):
            way = "" if name in NOT_COMPARABLE else " v" if name in LOWER_IS_BETTER else " ^"
            table.add_row(name + way, *(_cell(result, name, self._has_stars, of_difference) for result in results))
        return table


def summarise(
    names: list[str], found: list[Scores], settings: Settings, config: RunConfig, documents: list[int], seconds: float
) -> Evaluation:
    """Return the evaluation of the models `names` from their scores `found`, in the same order, on `documents`."""
    wanted = config.evaluation
    # A single document has no variance over documents.
    draws = [
        scores.resampled(documents, wanted.bootstrap, settings.seed, wanted.confidence)
        if wanted.bootstrap and len(documents) > 1
        else {}
        for scores in found
    ]
    results = []
    for name, scores, drawn in zip(names, found, draws):
        means = scores.means()
        result = ModelResult(name, {key: value for key, value in means.items() if not key.startswith(f"{CURVE}/")})
        result.intervals = _intervals(drawn, wanted.confidence, result.metrics)
        applied = {key: sum(bool(weight) for _, weight in entries.values()) for key, entries in scores.sums.items()}
        result.documents = {key: applied[CROSS_ENTROPY.get(key, key)] for key in result.metrics}
        if results:
            first = results[0].metrics
            shared = [key for key in result.metrics if key in first and key not in NOT_COMPARABLE]
            result.differences = {key: result.metrics[key] - first[key] for key in shared}
            paired = {key: drawn[key] - draws[0][key] for key in shared if key in drawn and key in draws[0]}
            result.difference_intervals = _intervals(paired, wanted.confidence, paired)
        result.curves = _curves(means, drawn, wanted.confidence)
        for key, values in scores.samples.items():  # all models share the bins
            everything = [value for other in found for value in other.samples.get(key, [])]
            edges = np.histogram_bin_edges(everything, HISTOGRAM_BINS)
            counts, _ = np.histogram(values, edges)
            result.histograms[key] = {"edges": edges.tolist(), "shares": (counts / len(values)).tolist()}
        result.per_document = scores.per_document() if wanted.per_document else {}
        results.append(result)
    selected = selecting_keys(config)
    shared_settings = {
        "base_model": config.model_name,
        "mode": selected.get("ebft.mode") or selected["rl"] or config.method.name,
        "documents": len(documents),
        **asdict(settings),
        "bootstrap": wanted.bootstrap,
        "confidence": wanted.confidence,
        "feature_layers": config.ebft.feature_layers,
        "embed_method": config.ebft.embed_method,
    }
    if config.method.rows == "tokens":
        options = ("stride", "context_length", "generate_max_len", "min_completion_prefix")
        shared_settings |= {name: getattr(config.ebft, name) for name in options}
    return Evaluation(results, shared_settings, machine_card(seconds))


def machine_card(seconds: float) -> dict[str, Any]:
    """Return the hardware and the software versions that were used."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "device": gpu or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("ebft", "torch", "transformers", "trl", "peft")},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
    }


def check_result_file(path: Path) -> None:
    """Raise an error before the evaluation if `path` is not writable."""
    with doing(f"writing {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path if path.exists() and not path.is_file() else path.resolve().parent, os.W_OK):
        raise ConfigError(f"{path} is not writable. Choose another path.")


def _intervals(draws: Mapping[str, np.ndarray], confidence: float, names: Mapping[str, Any]) -> dict[str, list[float]]:
    found = {name: interval(draws[name], confidence) for name in names if name in draws}
    return {name: bounds for name, bounds in found.items() if bounds is not None}


def _curves(means: Mapping[str, float], draws: Mapping[str, np.ndarray], confidence: float) -> dict[str, list]:
    curves: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for name, value in means.items():
        if name.startswith(f"{CURVE}/"):
            _, curve, position = name.split("/")
            bounds = interval(draws[name], confidence) if name in draws else None
            curves[curve].append({"x": int(position), "value": value, "interval": bounds})
    return {curve: sorted(points, key=lambda point: point["x"]) for curve, points in curves.items()}


# The order of metrics in the tables; downstream metrics follow.
ORDER = (
    *("ce_loss", "perplexity", "ce_loss_all", "perplexity_all", "cfm_loss", "cfm_loss_plugin", "cfm_loss_whitened"),
    *("alignment", "diversity"),
)


def _cell(result: ModelResult, name: str, has_stars: bool, of_difference: bool) -> str:
    """A metric, or its difference from the first model, with its interval, and a star if the difference is not 0."""
    values, intervals, digits = result.metrics, result.intervals, ".4g"
    if of_difference:
        values, intervals, digits = result.differences, result.difference_intervals, "+.3g"
    if name not in values:
        return ""
    cell = f"{values[name]:{digits}}"
    if name in intervals:
        cell += f" [{intervals[name][0]:{digits}}, {intervals[name][1]:{digits}}]"
    low, high = result.difference_intervals.get(name, (0.0, 0.0))
    differs = name not in NOT_COMPARABLE and (low > 0 or high < 0)
    return f"{cell}*" if has_stars and differs and result.documents.get(name, 0) >= FEWEST_DOCUMENTS else cell


_NLL = {"reference_nll": "reference", "rollout_nll": "own samples", "rollout_nll_base": "own samples, base model"}
_STYLES = ("-", "--", ":")


def save_plots(evaluation: Evaluation, path: str | Path) -> None:
    """Plot the four panels into one image; raises ImportError without matplotlib."""
    plt = _pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(17, 9), layout="constrained")
    losses, features = axes[0]
    losses.set(title="Cross-entropy by position in the completion", xlabel="token", ylabel="nats per token")
    features.set(title="Feature-matching loss by completion length", xlabel="tokens", ylabel="cfm_loss")
    features.set_xscale("log", base=2)
    features.xaxis.set_major_formatter("{x:g}")
    for index, result in enumerate(evaluation.models):
        for style, (curve, label) in zip(_STYLES, _NLL.items()):
            _draw_curve(losses, result, curve, f"{result.model}: {label}", f"C{index}", style)
        _draw_curve(features, result, "cfm_loss", result.model, f"C{index}", "-")
    _draw_histogram(axes[1, 0], evaluation.models, "alignment")
    _draw_histogram(axes[1, 1], evaluation.models, "reward")
    for axis in axes.flat:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize="x-small", framealpha=0.6, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    with doing(f"writing --plot {path}"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    plt.close(figure)


def check_plots(path: Path) -> None:
    """Raise ConfigError before the evaluation if matplotlib does not support the format of `path`."""
    figure = _pyplot().figure()
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise ConfigError(f"--plot {path}: unsupported image format; expected one of {', '.join(sorted(known))}.")


def _pyplot() -> Any:
    with doing("importing matplotlib for --plot (pip install 'ebft[plots]')"):
        import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


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
        if (histogram := result.histograms.get(name)) is not None:
            axis.stairs(histogram["shares"], histogram["edges"], color=f"C{index}", label=result.model)
