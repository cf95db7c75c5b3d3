"""The report of a run: one HTML page without scripts and external resources, made from the run's files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ebft.run_files import EVALUATION, REPORT, START, is_report, read_object, settings_in_effect
from ebft.tools.dashboard.curves import NOT_COMPARABLE, evaluation_changes, is_number
from ebft.tools.dashboard.live import LiveRun, clock, local_time
from ebft.tools.dashboard.plots import figure
from ebft.tools.dashboard.rollouts import PROMPT_CHARACTERS, Sample, duration, first_and_last, heading, html_text

_SAMPLES = 4  # before and after
_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #212529; }
h1 { margin-bottom: 0; } h2 { border-bottom: 1px solid #dee2e6; margin-top: 2em; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(330px, 1fr)); gap: 1em; }
figure { margin: 0; } figcaption { font-size: 13px; } svg { width: 100%; font-size: 11px; fill: #495057; }
polyline { fill: none; stroke-width: 1.6; } .axis { fill: none; stroke: #adb5bd; } .healthy { fill: #d3f9d8; }
table { border-collapse: collapse; } td, th { padding: 2px 12px 2px 0; text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 2px 0; font-size: 13px; }
.sample { border-left: 3px solid #dee2e6; padding-left: 1em; margin: 1em 0; } .dim { color: #868e96; }
.reference { color: #2b8a3e; } .completion { color: #0b7285; } .failed { color: #c92a2a; }
"""


def write_report(folder: Path, evaluation: Path | None = None) -> Path:
    """Write report.html into `folder` and return its path; raises OSError if that fails.

    `evaluation` is the --output of `ebft evaluate`; by default evaluation.json in the folder, if there is one.
    """
    path = folder / REPORT
    if not is_report(path):
        raise FileExistsError(f"{path} is not the report of a run, and is kept. Rename it to write the report")
    part = path.with_name(f"{path.name}.part")
    part.write_text(report(folder, evaluation), encoding="utf-8")
    os.replace(part, path)
    return path


def report(folder: Path, evaluation: Path | None = None) -> str:
    """The page as text."""
    live = LiveRun(folder)
    live.poll()
    logs = -1
    while live.logs != logs:  # long files are read in parts
        logs = live.logs
        live.poll()
    plots = "".join(figure(curve) for curve in live.curves())
    before, after = first_and_last(folder, _SAMPLES)
    first = "First rollouts" if after else "Rollouts"
    parts = [
        _summary(live),
        _section("Curves", f'<div class="plots">{plots}</div>' if plots else ""),
        _section("Health messages", _health(live)),
        _section("Samples", _samples(first, before) + _samples("Last rollouts", after)),
        _section("Config", _table(settings_in_effect(live.run), "Options that differ from their defaults.")),
        _section("Environment", _table(_environment(live), "")),
        _section("Evaluation", _evaluation(live, evaluation or folder / EVALUATION)),
    ]
    title, body = html_text(f"ebft: {folder.absolute().name}"), "\n".join(filter(None, parts))
    head = f'<head><meta charset="utf-8"><title>{title}</title><style>{_CSS}</style></head>'
    return f'<!doctype html>\n<html lang="en">{head}\n<body>\n<h1>{title}</h1>\n{body}\n</body></html>\n'


def _section(title: str, content: str) -> str:
    return f"<h2>{title}</h2>\n{content}" if content else ""


def _summary(live: LiveRun) -> str:
    steps = f"step {live.step:g}" + (f" of {live.max_steps}" if live.max_steps else "")
    seconds = live.seconds_run()
    facts = [live.state, steps, "" if seconds is None else duration(seconds)]
    model, method = (html_text(live.run.get(key)) for key in ("model", "method"))
    of = " of " if method and model else ""
    lines = [f"<p>{method}{of}<b>{model}</b>: {html_text(', '.join(filter(None, facts)))}.</p>"]
    if not live.logs:
        has_ended = live.state not in ("running", "unknown")
        when = "The run ended before" if has_ended else "The run has not reached"
        lines.append(f"<p>{when} its first log, so there are no curves.</p>")
    if live.run.get("error"):
        lines.append(f'<p class="failed">{html_text(live.run["error"])}</p>')
    return "\n".join([*lines, *_later_start(live)])


def _later_start(live: LiveRun) -> list[str]:
    """What became of a later run in the same folder that did not begin to train; empty if there is none."""
    start = read_object(live.folder / START) or {}
    if not start or start.get("state") == live.run.get("state") == "running":
        return []
    error = f" ({html_text(start['error'])})" if start.get("error") else ""
    when = local_time(start.get("started"))
    at = "" if when is None else f", started {when.isoformat(' ', 'seconds')},"
    state = html_text(start.get("state"))
    return [
        f'<p class="failed">A later run in this folder{at} {state} before training began{error}. This page describes '
        "the run before it.</p>"
    ]


def _environment(live: LiveRun) -> dict[str, Any]:
    started = local_time(live.run.get("started"))
    when = None if started is None else started.isoformat(" ", "seconds")
    latest = live.metrics.latest
    found = {"host": live.run.get("host"), "started": when, "output_dir": live.run.get("output_dir")}
    if "memory/peak_gib" in latest:
        found["peak memory"] = f"{latest['memory/peak_gib']:.2f} GiB"
    versions = live.run.get("versions")
    return {key: value for key, value in found.items() if value} | (versions if isinstance(versions, dict) else {})


_COMPLETION_CHARACTERS = 2000


def _table(values: Any, introduction: str) -> str:
    """A table of names and values; empty if there are none."""
    if not isinstance(values, dict) or not values:
        return ""
    rows = "".join(f"<tr><th>{html_text(key)}</th><td>{html_text(value)}</td></tr>" for key, value in values.items())
    return (f"<p>{introduction}</p>" if introduction else "") + f"<table>{rows}</table>"


def _health(live: LiveRun) -> str:
    """The health messages, oldest first; empty if there are none."""
    found = []
    for message in live.health:
        when = f"{clock(message.get('time'))} step {message.get('step')}"
        remedy = f"<br><i>{html_text(message['remedy'])}</i>" if message.get("remedy") else ""
        text = f"<b>{html_text(message.get('name'))}</b> {html_text(message.get('message'))}{remedy}"
        found.append(f'<li><span class="dim">{html_text(when)}</span> {text}</li>')
    return f"<ul>{''.join(found)}</ul>" if found else ""


def _samples(title: str, found: list[Sample]) -> str:
    """Samples with their prompts and references; empty if there are none."""
    blocks = []
    for sample in found:
        parts = {
            "dim": None if sample.prompt is None else sample.prompt[-PROMPT_CHARACTERS:],
            "reference": sample.reference,
            "completion": sample.completion,
        }
        texts = "".join(
            f'<pre class="{name}">{html_text(value[:_COMPLETION_CHARACTERS])}</pre>'
            for name, value in parts.items()
            if value is not None
        )
        blocks.append(f'<div class="sample"><b>{html_text(heading(sample))}</b>{texts}</div>')
    legend = '<p>Prompt, <span class="reference">reference</span>, <span class="completion">completion</span>.</p>'
    return f"<h3>{title}</h3>{legend}{''.join(blocks)}" if blocks else ""


def _evaluation(live: LiveRun, path: Path) -> str:
    """How held-out metrics changed during training, and the comparison of models in the file of `ebft evaluate`."""
    changes = evaluation_changes(live.metrics)
    parts = []
    if changes:
        rows = "".join(
            f'<tr><th>{html_text(name.removeprefix("eval_"))}</th><td class="number">{first:.4g}</td>'
            f'<td class="number">{last:.4g}</td><td class="number">{last - first:+.4g}</td></tr>'
            for name, first, last in changes
        )
        parts.append(
            "<p>Held-out metrics during training: first and last evaluation. Their errors are not known; "
            "<code>ebft evaluate --output evaluation.json</code> measures them.</p>"
            f"<table><tr><th>metric</th><th>first</th><th>last</th><th>change</th></tr>{rows}</table>"
        )
    compared = read_object(path) or {}
    models = compared.get("models")
    if isinstance(models, list) and len(models) > 1 and all(isinstance(model, dict) for model in models):
        parts += [_comparison(models[0], model, compared) for model in models[1:]]
    notes = compared.get("notes")
    if isinstance(notes, list):
        parts += [f"<p>{html_text(str(note))}</p>" for note in notes]
    return "\n".join(filter(None, parts))


def _object(values: dict[str, Any], key: str) -> dict[str, Any]:
    """The object under a key; empty if there is none."""
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def _comparison(base: dict[str, Any], model: dict[str, Any], compared: dict[str, Any]) -> str:
    """The differences of a model from the first one, with their intervals."""
    rows = []
    intervals, settings = _object(model, "difference_intervals"), _object(compared, "settings")
    for name, difference in _object(model, "differences").items():
        values = [_object(found, "metrics").get(name) for found in (base, model)]
        if name in NOT_COMPARABLE or not all(is_number(value) for value in (*values, difference)):
            continue
        bounds = intervals.get(name)
        known = isinstance(bounds, list) and len(bounds) == 2 and all(map(is_number, bounds))
        error = f"[{bounds[0]:+.4g}, {bounds[1]:+.4g}]" if known else ""
        cells = (f"{values[0]:.4g}", f"{values[1]:.4g}", f"{difference:+.4g}", error)
        columns = "".join(f'<td class="number">{cell}</td>' for cell in cells)
        rows.append(f"<tr><th>{html_text(name)}</th>{columns}</tr>")
    if not rows:
        return ""
    confidence = settings.get("confidence")
    interval = f"{confidence:.0%} interval" if is_number(confidence) else "interval"
    return (
        f"<p>{html_text(model.get('model'))} compared with {html_text(base.get('model'))} on the same held-out "
        "documents.</p>"
        "<table><tr><th>metric</th><th>before</th><th>after</th><th>change</th>"
        f"<th>{interval} of the change</th></tr>{''.join(rows)}</table>"
    )
