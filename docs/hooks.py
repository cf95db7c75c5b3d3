"""Hooks of the documentation site (mkdocs.yml): links to files outside docs/, formulas, and search without a server.

Links are written as on GitHub, relative to the page: `../examples/paper_full.yaml`. The site contains a copy of each
file that is linked this way: Markdown as a page, images and notebooks as they are, other files as text that a browser
shows. Pages need no script from another host: formulas, `$...$`, are drawn by matplotlib, and what search needs in
pages that are opened as files is a copy.
"""

import html
import posixpath
import re
from functools import cache
from pathlib import Path

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
AS_THEY_ARE = {".png", ".svg", ".ipynb"}
LISTS = {"api.md", "options.md", "CONTRIBUTING.md"}  # they have every word: in search, below other pages
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)\s#]+)")
SHIM = "https://unpkg.com/iframe-worker/shim"  # in the pages of the plugin offline
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
SYNONYMS = {r"\lVert": r"\Vert", r"\rVert": r"\Vert"}  # symbols that matplotlib knows under another name
EM = 10.0  # size in points at which formulas are drawn; they are scaled to the size of the text
LETTERS = {1: "M", 2: "L", 3: "Q", 4: "C", 79: "Z"}  # of matplotlib's codes in a path of SVG


def on_files(files: Files, config) -> Files:
    """Add the files of the repository that pages link to, also indirectly."""
    pages = [file.src_uri for file in files.documentation_pages()]
    for page in pages:
        for target in sorted(outside(page, _text(page))):
            uri = published(target)
            if uri in files.src_uris:
                continue
            inclusion = InclusionLevel.NOT_IN_NAV
            if uri.endswith(".txt"):
                files.append(File.generated(config, uri, content=_read(target), inclusion=inclusion))
            else:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / target), inclusion=inclusion))
            if uri.endswith(".md"):
                pages.append(uri)
    return files


def on_page_markdown(markdown: str, page, **_) -> str:
    """Replace links to files outside docs/ by links to their copies in the site, and rank the page in search."""
    uri = page.file.src_uri
    if uri in LISTS:
        page.meta["search"] = {"boost": 0.2}
    folder = posixpath.dirname(repository_path(uri))

    def link(match: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        if inside_docs(target) and inside_docs(repository_path(uri)):
            return match[1]
        return posixpath.relpath(published(target), posixpath.dirname(uri) or ".")

    return LINK.sub(link, markdown)


def on_page_content(content: str, **_) -> str:
    """Draw the formulas; a formula on a line of its own is a paragraph."""

    def drawn(match: re.Match) -> str:
        svg = formula(html.unescape(match[2]).strip())
        return f"<p>{svg}</p>" if match[1] == "div" else svg

    return FORMULA.sub(drawn, content)


def on_post_page(output: str, page, **_) -> str:
    """Replace the script that pages load from another host by its copy in the site."""
    return output.replace(SHIM, posixpath.relpath("iframe-worker.js", posixpath.dirname(page.url) or "."))


def on_post_template(output: str, template_name: str, **_) -> str:
    """The same for pages that are not Markdown, such as 404.html."""
    return output.replace(SHIM, "/iframe-worker.js")


def inside_docs(path: str) -> bool:
    """Whether a path of the repository is in docs/."""
    return path.startswith("docs/")


def repository_path(uri: str) -> str:
    """The path in the repository of a page of the site."""
    return f"docs/{uri}" if (ROOT / "docs" / uri).is_file() else uri


def outside(page: str, markdown: str) -> set[str]:
    """The files outside docs/ that a page links to, as paths in the repository. Raises FileNotFoundError, and
    ValueError for the README, whose place in the site is taken by index.md."""
    folder = posixpath.dirname(repository_path(page))
    found = {posixpath.normpath(posixpath.join(folder, match[1])) for match in LINK.finditer(_without_code(markdown))}
    found = {path for path in found if not inside_docs(path)}
    if "README.md" in found:
        raise ValueError(f"{page} links to README.md, which is not part of the site: link to a page of docs/")
    for path in found:
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{page} links to {path}, which does not exist")
    return found


def published(path: str) -> str:
    """The path in the site of a file of the repository; a folder is published as the list of its files."""
    if inside_docs(path):
        return path.removeprefix("docs/")
    if path.endswith(".md") or Path(path).suffix in AS_THEY_ARE:
        return path
    return f"{path}.txt"


def _read(path: str) -> str:
    source = ROOT / path
    return "\n".join(sorted(p.name for p in source.iterdir())) if source.is_dir() else source.read_text("utf-8")


def _text(page: str) -> str:
    return (ROOT / repository_path(page)).read_text("utf-8")


def _without_code(markdown: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", markdown, flags=re.DOTALL | re.MULTILINE)


@cache
def formula(tex: str) -> str:
    """A formula as an inline SVG with the height and baseline of the text, and the formula as its label.

    Raises ValueError for commands that matplotlib's mathtext does not know.
    """
    from matplotlib.font_manager import FontProperties
    from matplotlib.mathtext import MathTextParser
    from matplotlib.textpath import TextPath

    tex = " ".join(tex.split())
    drawn = f"${re.sub('|'.join(map(re.escape, SYNONYMS)), lambda match: SYNONYMS[match[0]], tex)}$"
    width, height, depth, *_ = MathTextParser("path").parse(drawn, dpi=72, prop=FontProperties(size=EM))
    commands = []
    for points, code in TextPath((0, 0), drawn, size=EM).iter_segments():
        pairs = (f"{x:.2f} {-y:.2f}" for x, y in zip(points[::2], points[1::2]))
        commands.append(LETTERS[int(code)] + ("" if LETTERS[int(code)] == "Z" else " ".join(pairs)))
    return (
        f'<svg class="formula" role="img" aria-label="{html.escape(tex, quote=True)}" '
        f'viewBox="0 {depth - height:.2f} {width:.2f} {height:.2f}" style="width:{width / EM:.3f}em;'
        f'height:{height / EM:.3f}em;vertical-align:{-depth / EM:.3f}em"><path d="{"".join(commands)}"/></svg>'
    )
