"""Results as files: SIZE.json to read, and SIZE-documents.json with what every document adds to every metric."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from metrics import COLUMNS

# Beside a run: a metric's sum on each document; beside a task: the documents' weights, the same for every model.
Sums = dict[str, list[float]]


def store(folder: Path, size: str, found: dict[str, Any]) -> None:
    """Write both files of a size. Raises ValueError where models were not measured on the same documents."""
    weights: dict[str, Sums] = {}
    sums: dict[str, Sums] = {}
    for cell in found["cells"]:
        task = cell["cell"]["task"]
        parts = {name: cell["per_document"][name] for name in COLUMNS[task] if name in cell["per_document"]}
        shared = weights.setdefault(task, {name: part["weight"] for name, part in parts.items()})
        if shared != {name: part["weight"] for name, part in parts.items()}:
            raise ValueError(f"{cell['cell']['name']} was not measured on the documents of the other models.")
        sums[cell["cell"]["name"]] = {name: [_short(value) for value in part["sum"]] for name, part in parts.items()}
    lean = [{key: value for key, value in cell.items() if key != "per_document"} for cell in found["cells"]]
    write_whole(folder / f"{size}-documents.json", _lines({"weights": weights, "sums": sums}))
    write_json(folder / f"{size}.json", {**found, "cells": lean})


def load(folder: Path, size: str) -> dict[str, Any] | None:
    """The results of a size with `sums` and `weights` in every cell; None where there are none."""
    if not (folder / f"{size}.json").is_file():
        return None
    found = json.loads((folder / f"{size}.json").read_text(encoding="utf-8"))
    documents = json.loads((folder / f"{size}-documents.json").read_text(encoding="utf-8"))
    for cell in found["cells"]:
        cell["sums"] = documents["sums"][cell["cell"]["name"]]
        cell["weights"] = documents["weights"][cell["cell"]["task"]]
    return found


def load_sweep(folder: Path, size: str) -> dict[str, Any] | None:
    """What a sweep of a size's learning rates gave; None where there was none."""
    file = folder / f"{size}-sweep.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def store_sweep(folder: Path, size: str, found: dict[str, Any]) -> Path:
    """Write what `load_sweep` reads; returns the file."""
    file = folder / f"{size}-sweep.json"
    write_json(file, found)
    return file


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON to read."""
    write_whole(path, json.dumps(value, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def _lines(documents: dict[str, dict[str, Sums]]) -> str:
    """JSON with a line for each run and task, so that a change of one is a change of one line."""
    line = lambda name, value: f"{json.dumps(name)}: {json.dumps(value)}"
    block = lambda values: "{\n" + ",\n".join(line(name, value) for name, value in values.items()) + "\n}"
    parts = [f"{json.dumps(part)}: {block(values)}" for part, values in documents.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _short(value: float) -> float:
    return float(f"{value:.6g}")
