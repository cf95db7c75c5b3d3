"""Rows in the terminal: every token as `text(label, id)`, in colour."""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import Environment
from rich.console import RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ebft.data.row_counts import SectionReport
from ebft.data.transforms.rows import IGNORE
from ebft.methods.views import Block, Part, RowView, Token

FIRST_BLOCKS = 8  # blocks of a document that are listed; the anchors of all are marked among its tokens
LEARNED, IGNORED, SPECIAL, ANCHOR = "green", "dim", "bold magenta", "reverse cyan"


def legend() -> Text:
    """How tokens are written."""
    return Text.assemble(
        "Tokens are written as text(label, id): ",
        ("in the cross-entropy", LEARNED),
        ", ",
        (f"not in it ({IGNORE})", IGNORED),
        ", ",
        ("special token", SPECIAL),
        ", ",
        ("[anchor]", ANCHOR),
        " before the first token of a block.",
    )


def show_reports(reports: list[SectionReport], are_printed: bool = False) -> Iterator[Text]:
    """The documents and rows of each section, with some documents for each reason.

    If `are_printed`, the line of each section was printed when its rows were loaded, and is not repeated.
    """
    for report in reports:
        if not are_printed:
            yield Text(str(report), style="bold")
        for reason, count in report.counts.items():
            examples = report.examples.get(reason, [])
            more = ", ..." if count > len(examples) else ""
            section = f"{report.section}:" if are_printed else " "
            yield Text(f"{section} {count:,} {reason}: {', '.join(examples)}{more}")


def show_row(title: str, view: RowView) -> Iterator[RenderableType]:
    """A row with all of its tokens."""
    yield Rule(Text(title, style="bold"), align="left")
    for part in view.parts:
        facts = [f"{name}: {value}" for name, value in part.facts]
        yield Text.assemble((part.title, "bold underline"), "  ", ("; ".join(facts), "italic"))
        yield from _roles(part)
        yield _tokens(part)
        if part.blocks:
            yield _blocks(part.blocks)
    for name, value in view.columns:
        yield Text.assemble((f"{name}: ", "bold"), value)


def _roles(part: Part) -> Iterator[Text]:
    """A line for each run of tokens with the same role."""
    for run in part.roles:
        is_single = run.stop == run.start + 1
        places = f"token {run.start}" if is_single else f"tokens {run.start}-{run.stop - 1}"
        yield Text.assemble(f"  {run.role} ", (f"({places}): ", IGNORED), f'"{part.text(run)}"')


def _tokens(part: Part) -> Text:
    line = Text()
    for token in part.tokens:
        if token.anchor is not None:
            line.append(f"[anchor {token.anchor}]", ANCHOR)
            line.append(" ")
        line.append(token.text, _style(token))
        line.append(f"({token.label}, {token.id}) ", LEARNED if token.label != IGNORE else IGNORED)
    return line


def _style(token: Token) -> str:
    return SPECIAL if token.special else LEARNED if token.label != IGNORE else IGNORED


def _blocks(blocks: list[Block]) -> Table:
    table = Table("anchor", "after", "reference", title_justify="left", show_edge=False)
    for block in blocks[:FIRST_BLOCKS]:
        table.add_row(str(block.anchor), Text(f"...{block.context}"), Text(block.reference, style=LEARNED))
    left = len(blocks) - FIRST_BLOCKS
    if left > 0:
        table.add_row("...", Text(f"{left:,} more blocks, the last at {blocks[-1].anchor}"), "")
    return table


_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{{ title }}</title>
<style>
body { font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222; background: #fff; }
h2 { border-bottom: 1px solid #ccc; margin-top: 2em; }
.facts { color: #555; }
.tokens { font-family: monospace; line-height: 1.9; overflow-wrap: anywhere; }
.t { border-radius: 3px; padding: 1px 2px; background: #eee; color: #555; white-space: pre-wrap; }
.t.learned { background: #c6efce; color: #033; }
.t.special { outline: 1px solid #a3a; }
.t small { font-size: 65%; opacity: .7; }
.anchor { border-radius: 3px; padding: 1px 3px; background: #06c; color: #fff; font-size: 75%; }
table { border-collapse: collapse; font-family: monospace; }
td, th { border: 1px solid #ddd; padding: 2px 6px; text-align: left; white-space: pre-wrap; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<ul>
{%- for report in reports %}
<li>{{ report }}
{%- if report.counts %}<ul>
{%- for reason, count in report.counts.items() %}
{%- set examples = report.examples.get(reason, []) %}
<li>{{ count }} {{ reason }}: {{ examples | join(", ") }}{{ ", ..." if count > examples | length }}</li>
{%- endfor %}</ul>{% endif %}</li>
{%- endfor %}
</ul>
<p>Each token is followed by its label and its id: <span class="t learned">in the cross-entropy</span>
<span class="t">not in it ({{ ignore }})</span> <span class="t special">special token</span>
<span class="anchor">anchor</span> before the first token of a block.</p>
{%- if note %}
<p>{{ note }}</p>
{%- endif %}
{%- for name, view in rows %}
<h2>{{ name }}</h2>
{%- for part in view.parts %}
<h3>{{ part.title }}</h3>
<p class="facts">{% for fact, value in part.facts %}{{ fact }}: {{ value }}{{ "; " if not loop.last }}{% endfor %}</p>
{%- if part.roles %}
<table>
{%- for run in part.roles %}
<tr><td>{{ run.role }}</td><td>{{ run.start }}-{{ run.stop - 1 }}</td><td>{{ part.text(run) }}</td></tr>
{%- endfor %}
</table>
{%- endif %}
<p class="tokens">
{%- for token in part.tokens %}
{%- if token.anchor is not none %}<span class="anchor">anchor {{ token.anchor }}</span> {% endif -%}
<span class="t{{ " learned" if token.label != ignore }}{{ " special" if token.special }}" title="position {{ loop.index0
 }}">{{ token.text }}<small>({{ token.label }}, {{ token.id }})</small></span> {% endfor %}</p>
{%- if part.blocks %}
<details><summary>{{ part.blocks | length }} blocks</summary><table>
<tr><th>anchor</th><th>after</th><th>reference</th></tr>
{%- for block in part.blocks %}
<tr><td>{{ block.anchor }}</td><td>...{{ block.context }}</td><td>{{ block.reference }}</td></tr>
{%- endfor %}
</table></details>
{%- endif %}
{%- endfor %}
{%- for column, value in view.columns %}
<p><b>{{ column }}</b>: {{ value }}</p>
{%- endfor %}
{%- endfor %}
</body>
</html>
"""


def page(title: str, reports: list[SectionReport], rows: list[tuple[str, RowView]], note: str | None = None) -> str:
    """The HTML of the page; `rows` are named views, `note` is shown once before them."""
    template = Environment(autoescape=True).from_string(_PAGE)
    return template.render(title=title, reports=reports, rows=rows, ignore=IGNORE, note=note)
