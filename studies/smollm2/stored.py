"""Results as files: a small JSON for each cell, one for the documents that they were measured on, one for the rates."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ValidationError, model_validator

CELLS, SWEEP = "cells", "sweep"  # folders of results
MEND = "Restore it, or delete it and run its cell again."


class _Cell(BaseModel):
    name: str
    group: str
    task: str
    start: str
    method: str
    seed: int


class _Machine(BaseModel):
    device: str
    threads: int
    python: str
    torch: str
    transformers: str
    commit: str


class _Cost(BaseModel):
    steps: int
    documents: float | None
    generated_tokens: float | None
    flops: float


class _Part(BaseModel):
    document: int | list[int]
    sum: list[float]
    weight: float | list[float]


class _Result(BaseModel):
    """What readers need of a cell's result; there may be more."""

    cell: _Cell
    machine: _Machine
    seconds: dict[str, float]
    metrics: dict[str, float | None]
    measured_on: dict[str, str]
    documents: dict[str, str]
    per_document: dict[str, _Part]
    learning_rate: float | None = None
    cost: _Cost | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.cell.method != "none" and self.cost is None:
            raise ValueError("has no cost of its training")
        for name, part in self.per_document.items():
            lengths = {len(part.sum), *(len(each) for each in (part.document, part.weight) if isinstance(each, list))}
            if len(lengths) > 1 or name not in self.measured_on:
                raise ValueError(f"per_document.{name} is not a number for each document")
        return self


def write_cell(folder: Path, result: dict[str, Any]) -> Path:
    """Write a cell's result, numbers with six digits; returns its file."""
    path = folder / f"{result['cell']['name']}.json"
    body = {key: value for key, value in result.items() if key != "per_document"}
    lines = [f"{json.dumps(key)}: {json.dumps(rounded(value))}" for key, value in body.items()]
    parts = [f"{json.dumps(name)}: {json.dumps(rounded(part))}" for name, part in result["per_document"].items()]
    lines.append('"per_document": {\n' + ",\n".join(parts) + "\n}")
    write_whole(path, "{\n" + ",\n".join(lines) + "\n}\n")
    return path


def packed(part: dict[str, list]) -> dict[str, Any]:
    """A metric of each document, with what is all documents, or all of one weight, said once."""
    documents, weights = part["document"], part["weight"]
    is_range = documents == list(range(len(documents)))
    return {
        "document": len(documents) if is_range else documents,
        "sum": part["sum"],
        "weight": weights[0] if len(set(weights)) == 1 else weights,
    }


def unpacked(part: dict[str, Any]) -> dict[str, list]:
    """What `packed` was given."""
    count = len(part["sum"])
    documents, weights = part["document"], part["weight"]
    return {
        "document": documents if isinstance(documents, list) else list(range(count)),
        "sum": part["sum"],
        "weight": weights if isinstance(weights, list) else [weights] * count,
    }


def load_cells(results: Path) -> list[dict[str, Any]]:
    """Every stored cell, with `sums`, `weights` and `files` by metric: a number, and a source, for each document.

    Cells that were measured on other documents than those of documents.json are left out.
    """
    paths, documents = sorted((results / CELLS).glob("*.json")), read(results / "documents.json")
    if paths and not documents:
        raise ValueError(f"{results} has cells but no documents.json, which says what they were measured on")
    found = []
    for path in paths:
        cell = read_cell(path)
        if not cell["documents"].items() <= documents["made_from"].items():
            continue
        parts = {name: unpacked(part) for name, part in cell.pop("per_document").items()}
        sources = {name: documents["sources"][cell["measured_on"][name]] for name in parts}
        cell["sums"] = {name: part["sum"] for name, part in parts.items()}
        cell["weights"] = {name: part["weight"] for name, part in parts.items()}
        cell["files"] = {name: [sources[name][number] for number in part["document"]] for name, part in parts.items()}
        found.append(cell)
    return found


def read_cell(path: Path) -> dict[str, Any] | None:
    """A cell's result; None where there is no file. Raises ValueError for one that is broken, or of another cell."""
    found = read(path)
    if found is None and not path.is_file():
        return None
    try:
        name = _Result.model_validate(found).cell.name
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path} is no result: {f'{where}: ' if where else ''}{first['msg']}. {MEND}") from error
    if name != path.stem:
        raise ValueError(f"{path} is the result of {name}. {MEND}")
    return found


def rounded(value: Any) -> Any:
    """A JSON value with six significant digits of each number, and null for what is none (NaN)."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, (list, tuple)) else value


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON to read."""
    write_whole(path, json.dumps(value, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def empty_unless(folder: Path, mark: str, name: str = "made_from.txt") -> None:
    """Empty a folder whose checkpoints are not of what `mark` says, so that no training goes on from them."""
    stamp = folder / name
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != mark:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        stamp.write_text(mark, encoding="utf-8")


def read(file: Path) -> Any | None:
    """The value in a JSON file; None where there is no file. Raises ValueError where it cannot be read."""
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}. {MEND}") from error
