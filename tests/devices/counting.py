"""Counts of kernels and waits of the pretend device, by the line of `src/ebft` that they come from."""

from __future__ import annotations

import ast
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

import ebft

_SOURCE = str(Path(ebft.__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_DEVICE = (str(Path(__file__).parent), str(Path(_SOURCE, "tools", "doctor", "fake.py")))


@dataclass
class Counts:
    """What the device did, by `file:line` of the package; `(backward)` for what autograd's own thread started.
    `uploads` are copies to the device; those that wait for it are also among `waits`."""

    kernels: Counter[str] = field(default_factory=Counter)
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)  # (line, operation)
    uploads: Counter[str] = field(default_factory=Counter)

    def copy(self) -> Counts:
        return Counts(*(counter.copy() for counter in (self.kernels, self.waits, self.uploads)))

    def add(self, other: Counts) -> None:
        self.kernels.update(other.kernels)
        self.waits.update(other.waits)
        self.uploads.update(other.uploads)

    def since(self, before: Counts) -> Counts:
        """What was counted after `before` was copied."""
        return Counts(self.kernels - before.kernels, self.waits - before.waits, self.uploads - before.uploads)

    def by_function(self) -> tuple[Counter[str], Counter[str]]:
        """The kernels and the waits by function instead of line, such as `rewards.py whiten`."""
        kernels, waits = Counter(), Counter()
        for line, count in self.kernels.items():
            kernels[_function(line)] += count
        for (line, operation), count in self.waits.items():
            waits[f"{_function(line)}: {operation}"] += count
        return kernels, waits

    def table(self, lines: int | None = None) -> str:
        """The totals, and the lines with the most waits, then kernels."""
        sums = f"{sum(self.kernels.values())} kernels, {sum(self.waits.values())} waits"
        found = [f"{sums}, {sum(self.uploads.values())} copies to the device"]
        for what, counter in (("waits", self.waits), ("copies", self.uploads), ("kernels", self.kernels)):
            for line, count in counter.most_common(lines):
                found.append(f"{count:7} {what:8} {line if isinstance(line, str) else '  '.join(line)}")
        return "\n".join(found)


@cache
def _functions(path: str) -> dict[int, str]:
    """The name of the innermost function of each line of a file of the package."""
    found = {}
    for node in ast.walk(ast.parse(Path(_SOURCE, path).read_text(encoding="utf-8"))):  # outer functions first
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found |= dict.fromkeys(range(node.lineno, node.end_lineno + 1), node.name)
    return found


def _function(line: str) -> str:
    path, _, number = line.partition(":")
    return f"{path} {_functions(path).get(int(number), '')}".strip() if number else line


current = Counts()


@contextmanager
def record() -> Iterator[Counts]:
    """Count what the device does inside the block."""
    global current
    before, current = current, Counts()
    try:
        yield current
    finally:
        current = before


def line_of_package() -> str:
    """`file:line` of the innermost call in the package."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_SOURCE) and path not in _DEVICE:
            return f"{path[len(_SOURCE) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return "(elsewhere)" if threading.current_thread() is threading.main_thread() else "(backward)"


def is_ours() -> bool:
    """Whether the package itself called PyTorch, and not a package that it called."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, *_DEVICE)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_SOURCE)
