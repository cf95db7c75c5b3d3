"""The sections of the report as HTML. Everything that comes from files is escaped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ebft.dashboard.files import read_object
from ebft.dashboard.live import LiveRun, clock
from ebft.dashboard.metrics import NOT_COMPARABLE, evaluation_changes, is_number
from ebft.dashboard.rollouts import Sample
from ebft.dashboard.text import PROMPT_CHARACTERS, heading, html_text

_COMPLETION_CHARACTERS = 2000


def table(values: Any, introduction: str) -> str:
    """A table of names and values; empty if there are none."""
    if not isinstance(values, dict) or not values:
        return ""
    rows = "".join(f"<tr><th>{html_text(key)}</th><td>{html_text(value)}</td></tr>" for key, value in values.items())
    return (f"<p>{introduction}</p>" if introduction else "") + f"<table>{rows}</table>"


def health(live: LiveRun) -> str:
    """The health messages, oldest first; empty if there are none."""
    found = []
    for message in live.health:
        when = f"{clock(message.get('time'))} step {message.get('step')}"
        remedy = f"<br><i>{html_text(message['remedy'])}</i>" if message.get("remedy") else ""
        text = f"<b>{html_text(message.get('name'))}</b> {html_text(message.get('message'))}{remedy}"
        found.append(f'<li><span class="dim">{html_text(when)}</span> {text}</li>')
    return f"<ul>{''.join(found)}</ul>" if found else ""


def samples(title: str, found: list[Sample]) -> str:
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


def evaluation(live: LiveRun, path: Path) -> str:
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
