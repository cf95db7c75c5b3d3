"""The tables of model families and of chat templates in the documentation list what the tests compare."""

import re
import runpy
from pathlib import Path

from ebft.catalog import FALLBACK, KEEP, TEMPLATES
from ebft.prefix.attention.attention_adapters import FAMILIES as ADAPTED
from tests.strided.families import AS_ROWS, COUNTS_PADDING, FAMILIES, WITH_STATES, tiny_model

DOCS = Path(__file__).parents[2] / "docs"


def first_column(page, heading):
    """The names in code in the first column of the table below a heading, row by row."""
    section = (DOCS / page).read_text(encoding="utf-8").partition(f"{heading}\n")[2]
    rows = re.findall(r"^\| (.*?) \|", section.partition("\n\n#")[0], re.MULTILINE)[2:]
    return [re.findall(r"`([\w/]+)`", row) for row in rows]


def test_families():
    interface, outside, shared, states, padding = first_column("models.md", "## Families and modes")
    outside = [name for name in outside if "/" not in name]
    assert sorted([*interface, *outside]) == sorted({name.partition("/")[0] for name in FAMILIES})
    assert (set(shared), set(states), set(padding)) == (set(WITH_STATES), AS_ROWS, set(COUNTS_PADDING))
    assert (
        f"**{len(interface) + len(outside) + len(shared)} model families**" in (DOCS.parent / "README.md").read_text()
    )
    adapted = {name for name in FAMILIES if {type(module).__name__ for module in tiny_model(name).modules()} & ADAPTED}
    assert {name.partition("/")[0] for name in adapted} - {"stablelm"} == set(outside)


def test_chat_templates():
    listed = [name for row in first_column("chats.md", "## Chat templates") for name in row]
    assert set(listed) == {*TEMPLATES, KEEP, f"{FALLBACK}NAME"}


def test_figures_of_layouts_are_those_that_the_code_gives(tmp_path):
    script = runpy.run_path(str(DOCS / "figures.py"))
    script["write_figures"](tmp_path)
    for name in script["FIGURES"]:
        stored = (DOCS / "images" / name).read_bytes()
        assert stored == (tmp_path / name).read_bytes(), f"docs/images/{name} is stale: run make docs"
