"""What runs between a config file and the first gradient, counted: `python docs/walk.py [strided|structured]`.

Prints JSON; docs/generate.py writes the figures of both modes into docs/reading.md. A file counts if one of its
functions is called between `load_config` and the first backward pass of a run of tests/golden/runs.py. A change of
file is a call from one file of the package into another one.
"""

import importlib
import inspect
import json
import pkgutil
import sys
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import ebft
from tests.golden.runs import write_inputs

PACKAGE = Path(ebft.__file__).parent
RUNS = {"strided": "strided_lora", "structured": "structured_several_turns"}


class Walk:
    """The functions of the package that are called, by file, and the calls of the step from file to file."""

    def __init__(self) -> None:
        self.functions: dict[str, set[str]] = defaultdict(set)
        self.calls = self.changes = 0
        self.in_step = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # not the body of a class or a module
        if event != "call" or not is_function or (file := self._file(frame)) is None:
            return
        self.functions[file].add(frame.f_code.co_qualname)
        if self.in_step and frame.f_back is not None and (caller := self._file(frame.f_back)) is not None:
            self.calls += 1
            self.changes += caller != file

    @staticmethod
    def _file(frame: FrameType) -> str | None:
        path = Path(frame.f_code.co_filename)
        return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else None


class _FirstGradientError(Exception):
    """Ends the run at the first backward pass."""


def walk(mode: str) -> dict[str, Any]:
    """The figures of a mode."""
    found = Walk()

    for module in pkgutil.walk_packages(ebft.__path__, "ebft."):  # what runs once, when a module is imported
        if not module.name.startswith(("ebft.tools", "ebft.examples")) and "__main__" not in module.name:
            importlib.import_module(module.name)

    def backward(*args: Any, **kwargs: Any) -> None:
        sys.setprofile(None)
        raise _FirstGradientError

    torch.Tensor.backward = backward
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        file = write_inputs(RUNS[mode], Path(folder))
        sys.setprofile(found)
        try:
            ebft.train(ebft.load_config(file))
        except _FirstGradientError:
            pass
    trainer = ebft.StridedEBFTTrainer if mode == "strided" else ebft.EBFTTrainer
    classes = [kind for kind in inspect.getmro(trainer) if kind is not object]
    return {
        "files": len(found.functions),
        "rooms": len({file.partition("/")[0] for file in found.functions}),
        "files of one function": sum(len(names) == 1 for names in found.functions.values()),
        "classes": len(classes),
        "own classes": sum(kind.__module__.startswith("ebft.") for kind in classes),
        "names": {file: sorted(names) for file, names in sorted(found.functions.items())},
    }


if __name__ == "__main__":
    print(json.dumps(walk(*sys.argv[1:]), indent=1))
