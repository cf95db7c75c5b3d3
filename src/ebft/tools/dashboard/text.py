"""Samples and numbers as text for a terminal."""

from __future__ import annotations

from html import escape

from rich.text import Text

from ebft.printed import printable
from ebft.tools.dashboard.rollouts import Sample

PROMPT_CHARACTERS = 400  # at most, of the end of a prompt
_LABELS = {"prompt": "dim", "reference": "green", "completion": "cyan"}
_INTEGERS = ("length",)


def html_text(value: object) -> str:
    """Any value as text in HTML, escaped, with control characters as visible symbols; empty for None."""
    return escape(printable("" if value is None else str(value)))


def value_text(name: str, value: float | None) -> str:
    """The value of a term; empty for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if name in _INTEGERS else f"{round(value, 3) + 0.0:+.3f}"


def heading(sample: Sample) -> str:
    """One line: the step, the place, the number of copies if there are several, and the terms of a sample."""
    where = f"step {sample.step}" + (f", {sample.place}" if sample.place else "")
    where += f" (×{sample.copies})" if sample.copies > 1 else ""
    return "  ".join([where, *(f"{name} {value_text(name, value)}" for name, value in sample.terms.items())])


def sample_text(sample: Sample, full: bool = False) -> Text:
    """A sample as several lines; without `full`, only the end of a long prompt."""
    prompt = sample.prompt
    if prompt is not None and len(prompt) > PROMPT_CHARACTERS and not full:
        prompt = "..." + prompt[-PROMPT_CHARACTERS:]
    parts = {"prompt": prompt, "reference": sample.reference, "completion": sample.completion}
    text = Text(heading(sample), style="bold")
    for label, value in parts.items():
        if value is not None:
            text.append(f"\n{label:<12}", style="bold not dim")
            text.append(printable(value).replace("\n", "\n" + " " * 12), style=f"not bold {_LABELS[label]}")
    return text


def duration(seconds: float) -> str:
    """A duration such as 45s, 3m20s, 2h05m or 3d04h."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    for small, big, unit in ((60, 60, "ms"), (3600, 24, "hm"), (86400, 10**9, "dh")):
        if seconds < small * big:
            part = small // 60 if unit != "dh" else 3600
            return f"{seconds // small}{unit[0]}{seconds % small // part:02d}{unit[1]}"
    return f"over {10**9}d"  # from damaged times
