"""What is written: every token with its label and id, and nothing of the data as markup."""

import re
from html import unescape

from ebft.data.row_counts import SectionReport
from ebft.methods.views import Block, RowPart, RowView, Token
from ebft.tools.preview import page

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
REPORT = SectionReport("datasets", 5, 3, {"too short": 4}, {"too short": [EVIL, "b, row 1"]})


def test_the_page_escapes_everything_and_needs_no_other_file():
    html = page(EVIL, [REPORT], [(EVIL, VIEW)])
    text = unescape(re.sub(r"<[^>]*>", "", html))
    assert not re.search(r"<script|\b(?:src|href)=|http|url\(", html) and text.count(EVIL) >= 7
    assert f"{EVIL}(2, 2)" in text and "<s>(-100, 1)" in text
    assert '<span class="t learned" title="position 1">' in html and "anchor 1</span>" in html
    assert '<span class="t special" title="position 0">' in html
    assert "reference 9" in text and f"4 too short: {EVIL}, b, row 1, ..." in text
