"""Counts what a reader of the code meets: `python docs/walk.py`.

Prints, as JSON, the figures of the package (files, lines, imports) and those of the walk from a config file to the
first gradient in each mode, which docs/reading.md contains (docs/generate.py writes them there). A file is part of the
walk if one of its functions is called between `load_config` and the first backward pass of a run of
tests/golden/runs.py. A change of file is a call from one file of the package into another one, within `compute_loss`.
"""

import ast
import contextlib
import importlib
import inspect
import json
import pkgutil
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "ebft"
RUNS = {"strided": "strided_lora", "structured": "structured_several_turns"}


def house() -> dict[str, int]:
    """Files and lines of the package and of its tests, and how the files import each other (for types as well)."""
    imports = imports_of_files()
    sizes = sorted(len(path.read_text(encoding="utf-8").splitlines()) for path in modules().values())
    importers = defaultdict(set)
    for name, imported in imports.items():
        for other in imported:
            importers[other].add(name)
    tests = [path for path in (ROOT / "tests").rglob("*.py")]
    return {
        "files": len(sizes),
        "lines": sum(sizes),
        "median": round(statistics.median(sizes)),
        "90th percentile": sizes[len(sizes) * 9 // 10],
        "files under 60 lines": sum(size < 60 for size in sizes),
        "files with one importer": sum(len(found) == 1 for found in importers.values()),
        "files in circles of imports": sum(len(circle) for circle in circles(imports)),
        "lines of tests": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in tests),
    }


def modules() -> dict[str, Path]:
    """The files of the package, without the examples that are linked into it."""
    paths = [path for path in PACKAGE.rglob("*.py") if "examples" not in path.relative_to(PACKAGE).parts]
    names = {path: ".".join(("ebft", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in paths}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imports_of_files() -> dict[str, set[str]]:
    """The modules of the package that each of them imports anywhere."""
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
        if frame.f_code.co_name == "compute_loss" and (self.step is None or self.step is frame):
            self.step = frame if event == "call" else None
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
    print(json.dumps(walk(sys.argv[1]) if sys.argv[1:] else figures(), indent=1))
