"""Rows as one HTML page without scripts or other files; all values are escaped by the template."""

from __future__ import annotations

from jinja2 import Environment

from ebft.data.report import SectionReport
from ebft.data.transforms.rows import IGNORE
from ebft.preview.view import RowView

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
