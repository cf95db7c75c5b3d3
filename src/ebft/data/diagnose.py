"""Finding the file and line on which a table reader failed: a second, slower pass after an error."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

from ebft.data.text_file import read_text


def explain(kind: str, paths: list[Path], error: Exception) -> str:
    """A message naming the first file and row of `paths` that cannot be read as `kind`.

    Falls back to the reader's message (of `error`) if each file can be read individually. Raises DataError for a file
    that is not UTF-8 text.
    """
    check = _CHECKS.get(kind, _check_table)
    for path in paths:
        problem = check(path)
        if problem:
            return f"{problem}. Correct the file or leave it out."
    cause = error.__cause__ or error
    names = ", ".join(str(path) for path in paths[:5])
    return f"{names}: cannot be read together as {kind}: {cause}"


def _check_json(path: Path) -> str | None:
    text = read_text(path)
    if not text.strip():
        return f"{path}: the file is empty"
    if text.lstrip().startswith("["):
        return _check_json_array(path, text)
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            return f"{path}, line {number}: not valid JSON ({error.msg} at column {error.colno}): {_short(line)}"
        if not isinstance(row, dict):
            return f"{path}, line {number}: a row must be a JSON object, got {_short(line)}"
    return None


def _check_json_array(path: Path, text: str) -> str | None:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        return f"{path}, line {error.lineno}: not valid JSON ({error.msg} at column {error.colno})"
    if not rows:
        return f"{path}: the list of rows is empty"
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            return f"{path}, row {index}: a row must be a JSON object, got {_short(json.dumps(row))}"
    return None


def _check_csv(path: Path) -> str | None:
    reader = csv.reader(read_text(path).splitlines(keepends=True), delimiter="\t" if path.suffix == ".tsv" else ",")
    header = next(reader, None)
    if header is None:
        return f"{path}: the file is empty"
    for row in reader:
        if row and len(row) != len(header):
            return f"{path}, line {reader.line_num}: {len(row)} fields, but the header has {len(header)}"
    return None


def _check_table(path: Path) -> str | None:
    """Parquet and Arrow files have no lines: the reader's message for this file alone."""
    import pyarrow.parquet

    if path.suffix.lower() != ".parquet":
        return None
    try:
        pyarrow.parquet.read_schema(path)
    except (OSError, ValueError) as error:
        return f"{path}: not a readable Parquet file ({error})"
    return None


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


_CHECKS: dict[str, Callable[[Path], str | None]] = {"json": _check_json, "csv": _check_csv}
