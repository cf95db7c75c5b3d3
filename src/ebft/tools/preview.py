"""Rows in the terminal, every token as `text(label, id)` in colour, and as an HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

from jinja2 import Environment
from rich.console import RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ebft.data.row_counts import SectionReport
from ebft.data.transforms.rows import IGNORE
from ebft.methods.views import RowPart, RowView

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
    """The counts of each section with examples, and its line unless it was printed when the rows were loaded."""
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
        for run in part.roles:
            is_single = run.stop == run.start + 1
            places = f"token {run.start}" if is_single else f"tokens {run.start}-{run.stop - 1}"
            yield Text.assemble(f"  {run.role} ", (f"({places}): ", IGNORED), f'"{part.text(run)}"')
        yield _tokens(part)
        if part.blocks:
            table = Table("anchor", "after", "reference", title_justify="left", show_edge=False)
            for block in part.blocks[:FIRST_BLOCKS]:
                table.add_row(str(block.anchor), Text(f"...{block.context}"), Text(block.reference, style=LEARNED))
            left = len(part.blocks) - FIRST_BLOCKS
            if left > 0:
                table.add_row("...", Text(f"{left:,} more blocks, the last at {part.blocks[-1].anchor}"), "")
            yield table
    for name, value in view.columns:
        yield Text.assemble((f"{name}: ", "bold"), value)


def _tokens(part: RowPart) -> Text:
    line = Text()
    for token in part.tokens:
        if token.anchor is not None:
            line.append(f"[anchor {token.anchor}]", ANCHOR)
            line.append(" ")
        style = LEARNED if token.label != IGNORE else IGNORED
        line.append(token.text, SPECIAL if token.special else style)
        line.append(f"({token.label}, {token.id}) ", style)
    return line


def page(title: str, reports: list[SectionReport], rows: list[tuple[str, RowView]], note: str | None = None) -> str:
    """The HTML of the page; `rows` are named views, `note` is shown once before them."""
    text = files("ebft.tools").joinpath("preview.jinja").read_text(encoding="utf-8")
    template = Environment(autoescape=True).from_string(text)
    return template.render(title=title, reports=reports, rows=rows, ignore=IGNORE, note=note)
