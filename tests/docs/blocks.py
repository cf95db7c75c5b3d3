"""The code of the documentation: fenced blocks, and commands in the text."""

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("studies/*/README.md")])
FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"(?<!`)`(ebft\s[^`]+)`(?!`)")
PROMPT = re.compile(r"^\$ (.*(?:(?<=\\)\n.*)*)", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block: its page and line, the language, what follows the language, and the text as it stands."""

    page: Path
    line: int
    language: str
    information: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def title(self) -> str:
        """The name of the file that the block is, `title="NAME"`."""
        found = re.search(r'title="([^"]+)"', self.information)
        return found[1] if found else ""

    @property
    def highlighted(self) -> set[int]:
        """The numbers of its highlighted lines, `hl_lines="3 5"`, from 1."""
        found = re.search(r'hl_lines="([\d ]+)"', self.information)
        return set(map(int, found[1].split())) if found else set()

    @property
    def code(self) -> str:
        return textwrap.dedent(self.text)


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    text, found = page.read_text(encoding="utf-8"), []
    for match in FENCE.finditer(text):
        language, _, information = match[2].strip().partition(" ")
        found.append(Block(page, text[: match.start()].count("\n") + 1, language, information, match[3]))
    return found


def blocks(*languages: str) -> list[Block]:
    """The blocks of all pages in these languages."""
    return [block for page in PAGES for block in blocks_of(page) if block.language in languages]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def shell_lines(block: Block) -> list[str]:
    """The commands of a block: every line of `bash`, or those after a prompt `$` in other blocks."""
    text = block.text if block.language == "bash" else "\n".join(PROMPT.findall(block.text))
    lines = text.replace("\\\n", " ").split("\n")
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def inline_commands(page: Path) -> list[str]:
    """The commands `ebft ...` in the text of a page."""
    return [" ".join(command.split()) for command in INLINE.findall(prose(page))]
