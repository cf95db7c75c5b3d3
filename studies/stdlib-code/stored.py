"""Results as files: SIZE.json to read, and SIZE-documents.json with what every document adds to every metric."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from metrics import COLUMNS

# By metric a number for each document: 0 where the metric does not apply.
Numbers = dict[str, list[float]]


def store(folder: Path, size: str, found: dict[str, Any], files: dict[str, list[str]]) -> None:
    """Write both files of a size; `files` names the file of the library that each document of a task is from.

    Raises ValueError where models were not measured on the same documents.
    """
    weights: dict[str, Numbers] = {}
    sums: dict[str, Numbers] = {}
    for cell in found["cells"]:
        task, name = cell["cell"]["task"], cell["cell"]["name"]
        parts = {metric: cell["per_document"][metric] for metric in COLUMNS[task] if metric in cell["per_document"]}
        own = {metric: _dense(part, "weight", len(files[task])) for metric, part in parts.items()}
        if weights.setdefault(task, own) != own:
            raise ValueError(f"{name} was not measured on the documents of the other models.")
        sums[name] = {metric: _dense(part, "sum", len(files[task])) for metric, part in parts.items()}
    lean = [{key: value for key, value in cell.items() if key != "per_document"} for cell in found["cells"]]
    write_whole(folder / f"{size}-documents.json", _lines({"files": files, "weights": weights, "sums": sums}))
    write_json(folder / f"{size}.json", {**found, "cells": lean})


def load(folder: Path, size: str) -> dict[str, Any] | None:
    """The results of a size with `sums`, `weights` and `files` in every cell; None where there are none.

    Raises ValueError where the two files do not belong together, or cannot be read.
    """
    found = _read(folder / f"{size}.json")
    if found is None:
        return None
    documents = _read(folder / f"{size}-documents.json")
    names = [cell["cell"]["name"] for cell in found["cells"]]
    if documents is None or set(names) != set(documents["sums"]):
        raise ValueError(
            f"{folder / size}.json and {size}-documents.json are not of one run. Run the study again: "
            f"{found['command']}"
        )
    for cell, name in zip(found["cells"], names):
        task = cell["cell"]["task"]
        cell["sums"], cell["weights"] = documents["sums"][name], documents["weights"][task]
        cell["files"] = documents["files"][task]
    return found


def load_sweep(folder: Path, size: str) -> dict[str, Any] | None:
    """What a sweep of a size's learning rates gave; None where there was none."""
    return _read(folder / f"{size}-sweep.json")


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


def _lines(documents: dict[str, dict[str, Any]]) -> str:
    """JSON with a line for each run and task, so that a change of one is a change of one line."""
    line = lambda name, value: f"{json.dumps(name)}: {json.dumps(value)}"
    block = lambda values: "{\n" + ",\n".join(line(name, value) for name, value in values.items()) + "\n}"
    parts = [f"{json.dumps(part)}: {block(values)}" for part, values in documents.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _dense(part: dict[str, list], key: str, count: int) -> list[float]:
    """The numbers `key` of a metric for all `count` documents, six digits of each."""
    values = dict(zip(part["document"], part[key], strict=True))
    return [float(f"{values.get(document, 0.0):.6g}") for document in range(count)]


def _read(file: Path) -> Any | None:
    """The value in a JSON file; None where there is no file."""
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}. Restore it, or run the study again.") from error
