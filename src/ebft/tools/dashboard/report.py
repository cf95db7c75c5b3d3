"""The report of a run: one HTML page without scripts and external resources, made from the run's files."""

from collections.abc import Iterator
from html import escape
from importlib.resources import files
from itertools import cycle
from pathlib import Path
from typing import Any

from jinja2 import Environment
from jinja2.filters import do_mark_safe

from ebft.files import write_text
from ebft.health.outcome import Outcome
from ebft.printed import duration, printable
from ebft.run_files import EVALUATION, REPORT, START, is_report, read_object, settings_in_effect
from ebft.tools.dashboard.live import NOT_COMPARABLE, Curve, LiveRun, clock, local_time, range_text
from ebft.tools.dashboard.panels import axes, band, columns_of, number, outside_text
from ebft.tools.dashboard.rollouts import PROMPT_CHARACTERS, Sample, first_and_last, heading, is_number

_SAMPLES = 4  # before and after
_COMPLETION_CHARACTERS = 2000
_COLORS = ("#0b7285", "#ae3ec9", "#e67700", "#2b8a3e", "#c92a2a", "#1864ab")
_PLOT = {"left": 64, "right": 412, "top": 8, "bottom": 158, "width": 420, "height": 180}  # the axes, and the whole plot
_COLUMNS = 360  # points of a line at most


def write_report(folder: Path, evaluation: Path | None = None) -> Path:
    """Write report.html into `folder` and return its path; raises OSError if that fails.

    `evaluation` is the --output of `ebft evaluate`; by default evaluation.json in the folder, if there is one.
    """
    path = folder / REPORT
    if not is_report(path):
        raise FileExistsError(f"{path} is not the report of a run, and is kept. Rename it to write the report")
    write_text(path, report(folder, evaluation), is_flushed=False)
    return path


def report(folder: Path, evaluation: Path | None = None) -> str:
    """The page as text."""
    live = LiveRun(folder)
    live.poll()
    logs = -1
    while live.logs != logs:  # long files are read in parts
        logs = live.logs
        live.poll()
    steps, seconds = f"step {live.step:g}" + (f" of {live.max_steps}" if live.max_steps else ""), live.seconds_run()
    before, after = first_and_last(folder, _SAMPLES)
    outcome = live.outcome()
    judged = {change.name for change in outcome.held_out} if outcome else set()
    others = []
    for name in [name for name in live.metrics.series if name.startswith("eval_") and name not in judged]:
        plain, first, last = name.removeprefix("eval_"), live.metrics.first[name], live.metrics.latest[name]
        left_out = name.endswith(("_runtime", "_per_second")) or plain in NOT_COMPARABLE
        if not left_out and len(live.metrics.series[name].values) > 1:
            others.append((plain, (f"{first:.4g}", f"{last:.4g}", f"{last - first:+.4g}")))
    compared = read_object(evaluation or folder / EVALUATION) or {}
    start = read_object(folder / START) or {}
    later = None  # a run that did not begin to train
    if start and not start.get("state") == live.run.get("state") == "running":
        when = local_time(start.get("started"))
        later = start | {"at": when and f", started {when},"}
    peak = live.metrics.latest.get("memory/peak_gib")
    environment = {"host": live.run.get("host"), "started": local_time(live.run.get("started"))}
    environment |= {"output_dir": live.run.get("output_dir"), "peak memory": peak and f"{peak:.2f} GiB"}
    # Values are escaped, with control characters as visible symbols, and None is empty.
    text_of = lambda value: printable("" if value is None else str(value))
    shown = lambda value: value if hasattr(value, "__html__") else do_mark_safe(escape(text_of(value)))
    options = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    text = files("ebft.tools.dashboard").joinpath("report.jinja").read_text(encoding="utf-8")
    template = Environment(finalize=shown, **options).from_string(text)
    return template.render(
        title=f"ebft: {folder.absolute().name}",
        live=live,
        state=", ".join(filter(None, [live.state, steps, "" if seconds is None else duration(seconds)])),
        later=later,
        size=_PLOT,
        figures=[_figure(curve) for curve in live.curves()],
        clock=clock,
        before=[_sample(sample) for sample in before],
        after=[_sample(sample) for sample in after],
        settings=settings_in_effect(live.run),
        environment={key: value for key, value in environment.items() if value} | (live.run.get("versions") or {}),
        outcome=outcome,
        changes=_changes(outcome),
        others=others,
        comparisons=list(_comparisons(compared)),
        notes=compared.get("notes", []),
    )


def _changes(outcome: Outcome | None) -> list[tuple[str, list[tuple[str, tuple[str, ...]]]]]:
    """A title and rows of the training logs and of the evaluations that an outcome is based on."""
    if outcome is None:
        return []
    steps = "" if outcome.steps is None else f" (steps {outcome.steps[0]} and {outcome.steps[1]})"
    parts = {
        f"First and last evaluation{steps}": outcome.held_out,
        "First and last tenth of the training logs": outcome.training,
    }
    found = []
    for title, changes in parts.items():
        rows = []
        for each in changes:
            known = [f"{value:.2g}" if value is not None else "unknown" for value in (each.error, each.limit)]
            values = f"{each.before:.4g}", f"{each.after:.4g}", f"{each.after - each.before:+.2g}"
            rows.append((each.name, (*values, *known, each.word)))
        if rows:
            found.append((title, rows))
    return found


def _figure(curve: Curve) -> dict[str, Any]:
    """The texts and the coordinates of a plot: caption, healthy range, axes, and a line for each series."""
    (low, high), (first, last) = axes(curve)
    left, right, top, bottom = (_PLOT[side] for side in ("left", "right", "top", "bottom"))
    x = lambda fraction: round(left + fraction * (right - left), 1)
    y = lambda value: round(top + (high - min(high, max(low, value))) / (high - low) * (bottom - top), 1)
    lines = []
    for color, (label, series) in zip(cycle(_COLORS), curve.series.items()):
        columns = columns_of(series, min(_COLUMNS, max(2, len(series.steps))), first, last)
        points = [(x(at / (len(columns) - 1)), y(value)) for at, value in enumerate(columns) if value is not None]
        name = "" if label == curve.title else f"{label} "
        lines.append({"label": name, "value": number(series.values[-1]), "color": color, "points": points})
    shaded = band(curve.healthy, low, high)
    return {
        "title": curve.title,
        "wanted": curve.wanted,
        "outside": outside_text(curve),
        "usual": None if curve.healthy is None else range_text(curve.healthy),
        "band": None if shaded is None else (y(shaded[1]), f"{y(shaded[0]) - y(shaded[1]):.1f}"),
        "low": number(low),
        "high": number(high),
        "first": f"{first:.0f}",
        "last": f"{last:.0f}",
        "lines": lines,
    }


def _sample(sample: Sample) -> tuple[str, dict[str, str | None]]:
    """The heading and the texts of a sample, by their styles."""
    prompt = None if sample.prompt is None else sample.prompt[-PROMPT_CHARACTERS:]
    texts = {"dim": prompt, "reference": sample.reference, "completion": sample.completion}
    return heading(sample), {name: text and text[:_COMPLETION_CHARACTERS] for name, text in texts.items()}


def _comparisons(compared: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The differences of each model from the first one in a result of `ebft evaluate`, with their intervals."""
    confidence = compared.get("settings", {}).get("confidence")
    interval = "interval" if confidence is None else f"{100 * confidence:g}% interval"
    base, *models = compared.get("models") or [None]
    for model in models:
        rows = []
        for name, difference in (model.get("differences") or {}).items():
            before, after = (found["metrics"].get(name) for found in (base, model))
            if name in NOT_COMPARABLE or not all(map(is_number, (before, after, difference))):
                continue
            low, high = (model.get("difference_intervals") or {}).get(name) or (None, None)
            error = f"[{low:+.4g}, {high:+.4g}]" if is_number(low) and is_number(high) else ""
            rows.append((name, (f"{before:.4g}", f"{after:.4g}", f"{difference:+.4g}", error)))
        if rows:
            yield {"name": model["model"], "base": base["model"], "interval": interval, "rows": rows}
