"""Finding the file and line on which a table reader failed: a second, slower pass after an error."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

from ebft.data.text_file import read_text
from ebft.errors import DataError, cause


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
    names = ", ".join(str(path) for path in paths[:5])
    together = " together" if len(paths) > 1 else ""
    return f"{names}: cannot be read{together} as {kind}: {cause(error.__cause__ or error)}"


def check_begins_with_rows(path: Path) -> None:
    """Raise DataError unless a JSON file begins with an object or a list: the reader crashes on other values."""
    try:
        with path.open("rb") as file:
            start = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from error
    if start and start[:1] not in (b"{", b"["):
        problem = _check_json(path) or f"{path}, line 1: a row must be a JSON object, got {_short(str(start[:60]))}"
        raise DataError(f"{problem}. Correct the file or leave it out.")


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
        except RecursionError:
            return f"{path}, line {number}: nested too deeply"
        except json.JSONDecodeError as error:
            return f"{path}, line {number}: not valid JSON ({error.msg} at column {error.colno}): {_short(line)}"
        if not isinstance(row, dict):
            return f"{path}, line {number}: a row must be a JSON object, got {_short(line)}"
    return None


def _check_json_array(path: Path, text: str) -> str | None:
    try:
        rows = json.loads(text)
    except RecursionError:
        return f"{path}: nested too deeply"
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
        return f"{path}: not a readable Parquet file ({cause(error)})"
    return None


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


_CHECKS: dict[str, Callable[[Path], str | None]] = {"json": _check_json, "csv": _check_csv}
