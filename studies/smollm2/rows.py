"""Rows of data: reading and writing them, and choosing some of many so that no source stands for all."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
MOST_OF_A_PACKAGE = 0.5  # of the rows of a part; a package is the first part of a file's path


def spread(rows: list[Row], wanted: int, most: int) -> list[Row]:
    """`wanted` rows, at most `most` of a file and half of a package, in an order that only texts decide."""
    of_file: dict[str, int] = {}
    of_package: dict[str, int] = {}
    chosen = []
    for row in sorted(rows, key=digest):
        package = row["file"].partition("/")[0]
        if of_file.get(row["file"], 0) < most and of_package.get(package, 0) < max(1, MOST_OF_A_PACKAGE * wanted):
            of_file[row["file"]] = of_file.get(row["file"], 0) + 1
            of_package[package] = of_package.get(package, 0) + 1
            chosen.append(row)
        if len(chosen) == wanted:
            break
    return chosen


def unique(rows: Iterable[Row], column: str) -> list[Row]:
    """The rows, those with the same text in a column once."""
    return list({row[column]: row for row in rows}.values())


def digest(row: Row) -> str:
    """A number of a row's text alone."""
    return hashlib.blake2b((row.get("input", "") + row.get("text", "")).encode(), digest_size=8).hexdigest()


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def write_rows(path: Path, rows: list[Row]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
