"""Results of an evaluation: metrics, intervals, differences and curves of each model, as JSON and as a table."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.table import Table

from ebft.errors import ConfigError
from ebft.evaluation.settings import Settings
from ebft.scores import CURVE, Scores, interval

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig

HISTOGRAM_BINS = 40
# The order of metrics in the table; downstream metrics follow.
ORDER = (
    "ce_loss",
    "perplexity",
    "ce_loss_all",
    "perplexity_all",
    "cfm_loss",
    "cfm_loss_plugin",
    "cfm_loss_whitened",
    "alignment",
    "diversity",
)
_LOWER_IS_BETTER = ("ce_loss", "perplexity", "cfm_loss")


@dataclass
class ModelResult:
    """The results of one model.

    `intervals` are central bootstrap intervals over documents. `differences` and their intervals are relative to the
    first model and paired by document. `curves` contain points (position or length, value, interval), `histograms` the
    bin edges and the fraction of samples in each bin. `per_document`, if enabled in the config, contains for each
    metric the documents (indices into the held-out data) with the sum and the weight that each adds to the mean.
    """

    model: str
    metrics: dict[str, float]
    intervals: dict[str, list[float]] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    difference_intervals: dict[str, list[float]] = field(default_factory=dict)
    curves: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    histograms: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    per_document: dict[str, dict[str, list]] = field(default_factory=dict)


@dataclass
class Evaluation:
    """Results of several models on the same held-out documents, in the same feature space."""

    models: list[ModelResult]
    settings: dict[str, Any]
    machine: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return all results as JSON-serialisable types."""
        return asdict(self)

    def save(self, path: str | os.PathLike) -> None:
        """Write all results as JSON; raises ConfigError if that fails."""
        write_atomically(Path(path), json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n")

    def table(self) -> Table:
        """Return a table of metrics with intervals.

        A star marks metrics whose difference from the first model has an interval that excludes 0.
        """
        legend = "^ higher is better, v lower is better; brackets: interval over documents"
        legend += "; * differs from the first model" if len(self.models) > 1 else ""
        headings = _headings([result.model for result in self.models])
        table = Table("metric", *headings, title=self._title(), caption=legend)
        for name in _ordered({name for result in self.models for name in result.metrics}):
            table.add_row(_marked(name), *(_cell(result, name) for result in self.models))
        return table

    def _title(self) -> str:
        s = self.settings
        return f"{s['documents']} documents, {s['samples']} samples at temperature {s['temperature']:g}"


def summarise(
    names: list[str], found: list[Scores], settings: Settings, config: RunConfig, documents: list[int], seconds: float
) -> Evaluation:
    """Return the evaluation of the models `names` from their scores `found`, in the same order, on `documents`."""
    wanted = config.evaluation
    draws = [_draws(scores, documents, wanted.bootstrap, settings.seed) for scores in found]
    results = []
    for name, scores, drawn in zip(names, found, draws):
        means = scores.means()
        result = ModelResult(name, {key: value for key, value in means.items() if not key.startswith(f"{CURVE}/")})
        result.intervals = _intervals(drawn, wanted.confidence, result.metrics)
        if results:
            first = results[0].metrics
            shared = [key for key in result.metrics if key in first]
            result.differences = {key: result.metrics[key] - first[key] for key in shared}
            paired = {key: drawn[key] - draws[0][key] for key in shared if key in drawn and key in draws[0]}
            result.difference_intervals = _intervals(paired, wanted.confidence, paired)
        result.curves = _curves(means, drawn, wanted.confidence)
        result.histograms = {key: _histogram(key, values, found) for key, values in scores.samples.items()}
        result.per_document = scores.per_document() if wanted.per_document else {}
        results.append(result)
    shared_settings = {
        "base_model": config.base_model,
        "mode": "structured" if config.method.rows == "prompts" else "strided",
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


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically; raises ConfigError if `path` is not writable.

    An existing path that is not a regular file, such as /dev/stdout, is written to directly.
    """
    path = path.resolve()
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror}). Choose another path.") from error


def check_writable(path: Path) -> None:
    """Raise ConfigError before the evaluation if `path` is not writable."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror}). Choose another path.") from error
    replaced = path.is_file() or not path.exists()
    if path.is_dir() or not os.access(path.resolve().parent if replaced else path, os.W_OK):
        raise ConfigError(f"{path} is not writable. Choose another path.")


def _draws(scores: Scores, documents: list[int], resamples: int, seed: int) -> dict[str, np.ndarray]:
    """Return the resampled means; none for a single document, which has no variance over documents."""
    return scores.resampled(documents, resamples, seed) if resamples > 0 and len(documents) > 1 else {}


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


def _histogram(name: str, values: list[float], found: list[Scores]) -> dict[str, list[float]]:
    """Return the fraction of samples in each bin; all models share the bins."""
    everything = [value for scores in found for value in scores.samples.get(name, [])]
    edges = np.histogram_bin_edges(everything, HISTOGRAM_BINS)
    counts, _ = np.histogram(values, edges)
    return {"edges": edges.tolist(), "shares": (counts / len(values)).tolist()}


def _ordered(metrics: set[str]) -> list[str]:
    others = sorted(metrics - {*ORDER, "alignment_pass@1"})  # alignment_pass@1 is equal to alignment
    return [*(name for name in ORDER if name in metrics), *others]


def _marked(name: str) -> str:
    return f"{name} {'v' if name.startswith(_LOWER_IS_BETTER) else '' if name == 'diversity' else '^'}"


def _cell(result: ModelResult, name: str) -> str:
    if name not in result.metrics:
        return ""
    cell = f"{result.metrics[name]:.4g}"
    if name in result.intervals:
        low, high = result.intervals[name]
        cell += f" [{low:.4g}, {high:.4g}]"
    low, high = result.difference_intervals.get(name, (0.0, 0.0))
    return f"{cell}*" if low > 0 or high < 0 else cell


def _headings(models: list[str]) -> list[str]:
    """Return the last two parts of each path, or the full paths if these parts are not unique."""
    short = [str(Path(*Path(model).parts[-2:])) for model in models]
    return short if len(set(short)) == len(models) else models
