"""Real text that every machine has: the source of Python's standard library, split by file into three parts.

The base model learns from source code. Fine-tuning is about something else, the prose of the docstrings, and takes
it from other files.
"""

import ast
import hashlib
import json
import sysconfig
from pathlib import Path

from rich.progress import track

from ebft.quickstart.phases import console

# Tests and tables of characters are left out: they are not on every machine, and hardly anyone writes such code.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
PARTS = {"base": 60, "ebft": 25, "held_out": 15}  # in percent of the files
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FEWEST_FILES = 30


def write_corpus(folder: Path, max_files: int | None = None) -> None:
    """Write base.jsonl (source), ebft.jsonl and held_out.jsonl (docstrings) with rows {text, file}.

    A file's part depends on its path alone, so that no run trains on what another holds out. Raises ValueError
    where the machine has no source of its standard library.
    """
    documents = standard_library(max_files)
    parts: dict[str, list[dict[str, str]]] = {part: [] for part in PARTS}
    for file, text in documents.items():
        part = part_of(file, PARTS)
        text = text if part == "base" else docstrings(text)
        if text:
            parts[part].append({"text": text, "file": file})
    folder.mkdir(parents=True, exist_ok=True)
    for part, rows in parts.items():
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        console.print(f"{part}.jsonl: {len(rows)} files, {sum(len(row['text']) for row in rows) / 1e6:.1f} MB")


def standard_library(max_files: int | None = None) -> dict[str, str]:
    """Path below the library's folder -> text, for every distinct UTF-8 source file that is not a test."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: dict[str, str] = {}
    seen: set[str] = set()
    for path in track(source_files(root)[:max_files], description="reading source files"):
        try:
            text = path.read_text(encoding="utf-8")
            ast.parse(text)
        except (UnicodeDecodeError, SyntaxError, OSError):
            continue  # data of some test or template, or a file that this user may not read
        if text.strip() and text not in seen:
            seen.add(text)
            texts[path.relative_to(root).as_posix()] = text
    if len(texts) < FEWEST_FILES:
        raise ValueError(
            f"{root} holds the source of only {len(texts)} modules of Python's standard library, and the quickstart "
            f"needs {FEWEST_FILES}. Run it with a Python that ships its source (python.org, conda, uv, pyenv)."
        )
    return texts


def docstrings(source: str) -> str:
    """All docstrings of a source file, with a blank line between them; empty where there is none."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED)]
    return "\n\n".join(text for node in nodes if (text := ast.get_docstring(node)))


def source_files(root: Path) -> list[Path]:
    """The library's own source files in an order that does not follow their names, the same on every machine."""
    files = [path for path in root.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(root).parts)]
    return sorted(files, key=lambda path: number_of(path.relative_to(root).as_posix()))


def part_of(file: str, parts: dict[str, int]) -> str:
    """The one of `parts` (shares in percent by name) that a file belongs to, by a hash of its path."""
    percent = number_of(file) % 100
    for part, share in parts.items():
        if percent < share:
            return part
        percent -= share
    raise AssertionError(f"the shares {parts} do not add up to 100")


def number_of(file: str) -> int:
    return int.from_bytes(hashlib.blake2b(file.encode(), digest_size=8).digest(), "big")
