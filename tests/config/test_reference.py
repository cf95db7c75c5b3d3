"""The generated pages are those that the schema, the command line and the public names give."""

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


PAGES = runpy.run_path(str(DOCS / "generate.py"))["PAGES"]


@pytest.mark.parametrize("page", PAGES)
def test_the_page_is_fresh(page):
    rendered = PAGES[page]()
    assert (DOCS / page).read_text(encoding="utf-8") == rendered, f"docs/{page} is stale: run make docs"
