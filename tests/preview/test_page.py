"""What is written: every token with its label and id, and nothing of the data as markup."""

import io
from html.parser import HTMLParser

from rich.console import Console

from ebft.data.row_counts import SectionReport
from ebft.methods.views import Block, RowPart, RowView, Token
from ebft.tools.preview import legend, page, show_reports, show_row

EVIL = "<script>alert('&\"')</script>"
VIEW = RowView(
    parts=[
        RowPart(
            EVIL,
            [Token(1, "<s>", -100, True), Token(2, EVIL, 2, False, anchor=1), Token(3, "[red]x", -100, False)],
            facts=[("fact", EVIL)],
            blocks=[Block(1 + index, f"before {EVIL}", f"reference {index}") for index in range(10)],
        )
    ],
    columns=[(EVIL, EVIL)],
)
REPORT = SectionReport(
    "datasets", 5, 3, {"too short for one block": 4}, {"too short for one block": [EVIL, "b, row 1"]}
)


class Tags(HTMLParser):
    """The tags of a preview, its open tags and its text."""

    def __init__(self):
        super().__init__()
        self.seen, self.open, self.text, self.attributes = set(), [], "", []

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.attributes += [name for name, _ in attrs]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_escapes_everything_and_needs_no_other_file():
    tags = Tags()
    html = page(EVIL, [REPORT], [(EVIL, VIEW)])
    tags.feed(html)
    assert "script" not in tags.seen and tags.open == []
    assert not {"src", "href"} & set(tags.attributes) and "http" not in html and "url(" not in html
    assert tags.text.count(EVIL) >= 7
    assert f"{EVIL}(2, 2)" in tags.text and "<s>(-100, 1)" in tags.text
    assert '<span class="t learned" title="position 1">' in html and "anchor 1</span>" in html
    assert '<span class="t special" title="position 0">' in html
    assert "reference 9" in tags.text and f"4 too short for one block: {EVIL}, b, row 1, ..." in tags.text


def printed(*lines, colour=False):
    system = "standard" if colour else None  # whatever NO_COLOR is
    console = Console(file=io.StringIO(), width=300, color_system=system, force_terminal=colour, no_color=not colour)
    console.print(*lines, sep="\n")
    return console.file.getvalue()


def test_rows_and_reports_in_the_terminal():
    """Readable without colour; tokens with and without labels have different colours."""
    text = printed(*show_row("row 1", VIEW))
    assert f"<s>(-100, 1) [anchor 1] {EVIL}(2, 2) [red]x(-100, 3)" in text
    assert "2 more blocks, the last at 10" in text and f"fact: {EVIL}" in text and f"{EVIL}: {EVIL}" in text
    text = printed(*show_row("row 1", VIEW), colour=True)
    assert f"\x1b[32m{EVIL}\x1b[0m\x1b[32m(2, 2)" in text.replace("\x1b[32m(2, 2) ", "\x1b[32m(2, 2)")
    assert "\x1b[2m[red]x\x1b[0m\x1b[2m(-100, 3) " in text
    text = printed(*show_reports([REPORT]), legend())
    assert "datasets: 5 documents produced 3 rows; dropped 4 too short for one block" in text
    assert f"  4 too short for one block: {EVIL}, b, row 1, ..." in text and "not in it (-100)" in text
