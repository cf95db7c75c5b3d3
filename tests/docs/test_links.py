"""Links between pages, as GitHub shows them, and names of files and lines of code in the text: all of them exist."""

import re

import pytest
from pymdownx.slugs import slugify

from ebft import rewards
from tests.docs.blocks import PAGES, ROOT, prose

LINK = re.compile(r"\]\((?![a-z]+:)([^)\s#]*)(?:#([^)\s]+))?\)")
SLUG = slugify(case="lower")
OF_OTHERS = ("CUDA out", "CUDA error", "Killed", "Watchdog", "CheckpointError", "No available memory", "CAS service")
PATH = re.compile(r"`((?:[a-z_]+/)+[a-z_]+\.py)`")


def anchors(page) -> set[str]:
    """The anchors of a page's headings, those of sections that moved, and those of public names that the site adds."""
    text = prose(page)
    headings = [re.sub(r"[`*]", "", heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return (
        {SLUG(heading, "-") for heading in headings}
        | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
        | set(re.findall(r'<a id="([^"]+)">', text))
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    for path, anchor in LINK.findall(prose(page)):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {path}, which does not exist"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {path}#{anchor}, which is not a heading"


def test_files_named_on_the_page_of_the_architecture_exist():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = PATH.findall(text)
    assert len(found) > 10
    for path in found:
        assert any((ROOT / folder / path).is_file() for folder in ("", "src", "src/ebft")), path


def test_the_page_of_the_paper_has_the_code_of_the_step_and_functions_that_exist():
    text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    section = text[text.index("## The step") : text.index("## Defaults")]
    lines = re.findall(r"^\| .* \| `(.+)` \|$", section, re.MULTILINE)
    trainer = (ROOT / "src" / "ebft" / "strided" / "trainer.py").read_text(encoding="utf-8")
    places = [trainer.find(line) for line in lines]
    assert len(lines) == 10 and -1 not in places and places == sorted(places), list(zip(lines, places))
    names = re.findall(r"`rewards\.(?!py\b)(\w+)", text)
    assert len(names) > 5 and all(hasattr(rewards, name) for name in names)


def test_quoted_errors_are_messages_of_the_package_or_marked_as_those_of_others():
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `(.+?)`.* \| .* \| .* \|$", text[text.index("## Error messages") :], re.MULTILINE)
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "ebft").rglob("*.py"))
    code = re.sub(r'"\n +f?"', "", code)  # the parts of a message on several lines
    ours = [message for message in quoted if not message.startswith(OF_OTHERS)]
    assert len(quoted) - len(ours) == len(OF_OTHERS) and len(ours) >= 5
    for message in ours:
        parts = [part for part in re.split(r"'?\.\.\.'?|\d+|: ", message) if len(part) > 12]
        assert parts and [part for part in parts if part not in code] == [], message


def test_figures_in_the_readme_are_those_of_the_pages():
    """The ratios to the published trainer are those of the tables with SmolLM2 and 512 tokens."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    figures = re.findall(r"\*\*([\d.]+) times\*\*", text)
    rows = re.findall(r"^\| 512 \|.*$", (ROOT / "docs" / "speed.md").read_text(encoding="utf-8"), re.MULTILINE)
    tables = [re.findall(r"\| ([\d.]+) x (?=\|)", row)[:2] for row in rows if row.count("|") == 11]
    assert figures == [tables[0][0], tables[1][0], tables[0][1]] and tables[0][1] == tables[1][1]
    assert len(text[: text.index("## In Python")].split()) <= 450
