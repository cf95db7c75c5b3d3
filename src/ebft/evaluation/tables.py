"""Results of an evaluation as tables: metrics with intervals, and differences from the first model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from ebft.dashboard.metrics import NOT_COMPARABLE
from ebft.evaluation.notes import FEWEST_DOCUMENTS

if TYPE_CHECKING:
    from ebft.evaluation.result import Evaluation, ModelResult

# The order of metrics in the tables; downstream metrics follow.
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
_LOWER_IS_BETTER = ("ce_loss", "perplexity", "cfm_loss", "diversity")


def metrics_table(evaluation: Evaluation) -> Table:
    """Return a table of the metrics of each model with intervals.

    A star marks metrics whose difference from the first model has an interval that excludes 0. Intervals over fewer
    than 8 documents are not reliable enough for that, so there are no stars then.
    """
    has_stars = len(evaluation.models) > 1 and _has_enough_documents(evaluation)
    legend = "^ higher is better, v lower is better; brackets: interval over documents"
    legend += "; * differs from the first model" if has_stars else ""
    settings = evaluation.settings
    title = f"{_counted(settings['documents'], 'document')}, {_counted(settings['samples'], 'sample')} at temperature "
    title += f"{settings['temperature']:g}"
    table = Table("metric", *_headings(evaluation), title=title, caption=legend)
    for name in _ordered({name for result in evaluation.models for name in result.metrics}):
        table.add_row(_marked(name), *(_cell(result, name, has_stars) for result in evaluation.models))
    return table


def differences_table(evaluation: Evaluation) -> Table | None:
    """Return a table of the differences from the first model with intervals, paired by document.

    None if there is a single model. Metrics that cannot be compared between models are left out.
    """
    first, *others = evaluation.models
    if not others:
        return None
    first_heading, *headings = _headings(evaluation)
    has_stars = _has_enough_documents(evaluation)
    caption = "brackets: interval of the difference, paired by document" + ("; * excludes 0" if has_stars else "")
    table = Table("metric", *headings, title=f"Differences from {first_heading}", caption=caption)
    for name in _ordered({name for result in others for name in result.differences}):
        table.add_row(_marked(name), *(_difference(result, name, has_stars) for result in others))
    return table


def _has_enough_documents(evaluation: Evaluation) -> bool:
    return evaluation.settings["documents"] >= FEWEST_DOCUMENTS


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _ordered(metrics: set[str]) -> list[str]:
    others = sorted(metrics - {*ORDER, "alignment_pass@1"})  # alignment_pass@1 is equal to alignment
    return [*(name for name in ORDER if name in metrics), *others]


def _marked(name: str) -> str:
    if name in NOT_COMPARABLE:
        return name
    return f"{name} {'v' if name.startswith(_LOWER_IS_BETTER) else '^'}"


def _cell(result: ModelResult, name: str, has_stars: bool) -> str:
    if name not in result.metrics:
        return ""
    cell = f"{result.metrics[name]:.4g}"
    if name in result.intervals:
        low, high = result.intervals[name]
        cell += f" [{low:.4g}, {high:.4g}]"
    return f"{cell}*" if has_stars and _excludes_0(result, name) else cell


def _difference(result: ModelResult, name: str, has_stars: bool) -> str:
    if name not in result.differences:
        return ""
    cell = f"{result.differences[name]:+.3g}"
    if name in result.difference_intervals:
        low, high = result.difference_intervals[name]
        cell += f" [{low:+.3g}, {high:+.3g}]"
    return f"{cell}*" if has_stars and _excludes_0(result, name) else cell


def _excludes_0(result: ModelResult, name: str) -> bool:
    low, high = result.difference_intervals.get(name, (0.0, 0.0))
    return name not in NOT_COMPARABLE and (low > 0 or high < 0)


def _headings(evaluation: Evaluation) -> list[str]:
    """Return the last two parts of each path, or the full paths if these parts are not unique."""
    models = [result.model for result in evaluation.models]
    short = [str(Path(*Path(model).parts[-2:])) for model in models]
    return short if len(set(short)) == len(models) else models
