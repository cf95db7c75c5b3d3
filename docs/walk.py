"""Counts what a reader of the code meets: `python docs/walk.py`; `--check` compares it with docs/ratchet.json.

Prints, as JSON, the figures of the package (files, lines, imports) and of the walk from a config file to the first
gradient in each mode, which docs/reading.md contains (docs/generate.py writes them there). A file is part of the
walk if one of its functions is called between `load_config` and the first backward pass of a run of
tests/golden/runs.py. A change of file is a call from one file of the package into another one, within `compute_loss`.
"""

import ast
import contextlib
import importlib
import inspect
import io
import json
import pkgutil
import re
import statistics
import subprocess
import sys
import tempfile
import tokenize
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "ebft"
RUNS = {"strided": "strided_lora", "structured": "structured_several_turns"}


STORED = ROOT / "docs" / "ratchet.json"
STRANGE = re.compile(r"\b(?:those|that|which|them) of\b|\bof (?:which|those|them)\b", re.I)  # hides what is meant


def house() -> dict[str, int]:
    """Files and lines, how files import each other (for types as well), and what makes a text hard to read."""
    imports = imports_of_files()
    texts = {name: path.read_text(encoding="utf-8") for name, path in modules().items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    sizes = sorted(len(text.splitlines()) for text in texts.values())
    importers = defaultdict(set)
    for name, imported in imports.items():
        for other in imported:
            importers[other].add(name)
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    code = sum(len(_lines_of_code(text, trees[name])) for name, text in texts.items())
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    prose = [path.read_text(encoding="utf-8") for path in pages if path.name != "options.md"]
    folders: dict[str, set[str]] = defaultdict(set)
    for name, imported in imports.items():
        folders[_folder(name)] |= {_folder(other) for other in imported} - {_folder(name)}
    public: Counter[tuple[str, str]] = Counter()
    for tree in trees.values():
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                public[type(node).__name__, node.name] += 1
    several = Counter(kind for (kind, _), count in public.items() if count > 1)
    return {
        "files": len(sizes),
        "lines": sum(sizes),
        "median": round(statistics.median(sizes)),
        "90th percentile": sizes[len(sizes) * 9 // 10],
        "files under 60 lines": sum(size < 60 for size in sizes),
        "files with one importer": sum(len(found) == 1 for found in importers.values()),
        "files in circles of imports": sum(len(circle) for circle in circles(imports)),
        "folders in one circle of imports": max(map(len, circles(folders)), default=0),
        "lines of tests": _lines("tests"),
        "lines of benchmarks and studies": _lines("benchmarks", "studies"),
        "raises": (raises := sum(isinstance(node, ast.Raise) for node in nodes)),
        "raises per 10,000 lines of code": round(1e4 * raises / code),
        "private functions with one caller and at most 8 lines": _small(trees.values()),
        "names of several public classes": several["ClassDef"],
        "names of several public functions": several["FunctionDef"],
        "words of the documentation": sum(len(text.split()) for text in prose),
        "strange words": sum(len(STRANGE.findall(text)) for text in (*texts.values(), *prose)),
    }


def _lines(*folders: str) -> int:
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    paths = [path for path in paths if ".cache" not in path.parts]  # sources that benchmarks unpack
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def _lines_of_code(text: str, tree: ast.AST) -> set[int]:
    """Numbers of the lines with code: without blank lines, comments, docstrings and imports."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    found = {n for token in tokens if token.type not in layout for n in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            found -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def _small(trees: Iterable[ast.Module]) -> int:
    """The number of private functions of at most 8 lines whose name occurs once more in their file."""
    found = 0
    for tree in trees:
        used = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
        used.update(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("_") and not node.name.startswith("__"):
                found += used[node.name] == 1 and (node.end_lineno or 0) - node.lineno < 8
    return found


def _folder(name: str) -> str:
    """The folder of a module; a file beside the folders is one of its own."""
    parts = name.split(".")
    if parts[1:2] == ["tools"]:
        return ".".join(parts[:3])
    return ".".join(parts[:2]) if len(parts) > 1 else name


def check() -> int:
    """Compare the figures that only go down with the stored ones, and store lower ones; the exit status."""
    stored, found = json.loads(STORED.read_text()), house()
    grown = [f"{name}: {found[name]:,} instead of {limit:,}" for name, limit in stored.items() if found[name] > limit]
    for line in grown:
        print(f"docs/ratchet.json: {line}", file=sys.stderr)
    lower = {name: min(found[name], limit) for name, limit in stored.items()}
    if lower != stored:
        STORED.write_text(json.dumps(lower, indent=1) + "\n")
    return bool(grown)


def modules() -> dict[str, Path]:
    """The files of the package, without the examples that are linked into it."""
    paths = [path for path in PACKAGE.rglob("*.py") if "examples" not in path.relative_to(PACKAGE).parts]
    names = {path: ".".join(("ebft", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in paths}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imports_of_files() -> dict[str, set[str]]:
    """The modules of the package that each module imports anywhere."""
    known = modules()
    found: dict[str, set[str]] = {}
    for name, path in known.items():
        names = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        parents = {other for other in names if any(longer.startswith(f"{other}.") for longer in names & known.keys())}
        found[name] = (names & known.keys()) - {name} - parents
    return found


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules that import each other, directly or through others."""
    reached: dict[str, set[str]] = {}
    for name in imports:
        found, ahead = set(), [name]
        while ahead:
            new = imports[ahead.pop()] - found
            found |= new
            ahead += new
        reached[name] = found
    found = {frozenset(other for other in others if name in reached[other]) for name, others in reached.items()}
    return [set(circle) for circle in found if len(circle) > 1]


class Walk:
    """The functions of the package that are called, by file, and the calls of the step from file to file."""

    def __init__(self) -> None:
        self.functions: dict[str, set[str]] = defaultdict(set)
        self.calls = self.changes = 0
        self.step: Any = None  # the frame of compute_loss, while it runs

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # not the body of a class or a module
        if not is_function or (file := _file(frame)) is None:
            return
        if event == "return" and self.step is frame:
            self.step = None
        if event == "call" and frame.f_code.co_name == "compute_loss" and self.step is None:
            self.step = frame
        if event != "call":
            return
        self.functions[file].add(frame.f_code.co_qualname)
        if self.step is not None and frame.f_back is not None and (caller := _file(frame.f_back)) is not None:
            self.calls += 1
            self.changes += caller != file


def _file(frame: FrameType) -> str | None:
    path = frame.f_code.co_filename
    return path.removeprefix(f"{PACKAGE}/") if path.startswith(f"{PACKAGE}/") else None


class _FirstGradientError(Exception):
    """Ends the run at the first backward pass."""


def walk(mode: str) -> dict[str, Any]:
    """The figures of a mode, from a run in this process."""
    import torch

    import ebft
    from tests.golden.runs import write_inputs

    for module in pkgutil.walk_packages(ebft.__path__, "ebft."):  # what runs once, when a module is imported
        if not module.name.startswith(("ebft.tools", "ebft.examples")) and "__main__" not in module.name:
            importlib.import_module(module.name)

    def backward(*args: Any, **kwargs: Any) -> None:
        sys.setprofile(None)
        raise _FirstGradientError

    torch.Tensor.backward, found = backward, Walk()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        file = write_inputs(RUNS[mode], Path(folder))
        sys.setprofile(found)
        with contextlib.suppress(_FirstGradientError):
            ebft.train(ebft.load_config(file))
    classes = inspect.getmro(ebft.StridedEBFTTrainer if mode == "strided" else ebft.EBFTTrainer)[:-1]
    return {
        "files": len(found.functions),
        "files of one function": sum(len(names) == 1 for names in found.functions.values()),
        "calls in compute_loss": found.calls,
        "changes of file in compute_loss": found.changes,
        "classes of the trainer": len(classes),
        "functions": {file: sorted(names) for file, names in sorted(found.functions.items())},
    }


def figures() -> dict[str, Any]:
    """All figures; each mode runs in a process of its own, so that nothing is cached."""
    found: dict[str, Any] = {"package": house()}
    for mode in RUNS:
        command = [sys.executable, __file__, mode]
        printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
        found[mode] = json.loads(printed[printed.index("{") :])
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if sys.argv[1:] == ["--check"]:
        sys.exit(check())
    print(json.dumps(walk(sys.argv[1]) if sys.argv[1:] else figures(), indent=1))
