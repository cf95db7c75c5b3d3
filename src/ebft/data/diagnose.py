"""Finding the file and line on which a table reader failed: a second, slower pass after an error."""

import csv
from collections.abc import Callable
from pathlib import Path

from ebft.data.text_file import read_text
from ebft.errors import cause


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


def repeated_column(path: Path) -> str | None:
    """What is wrong with the header of a CSV file that names a column twice, which its reader would rename."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        header = next(csv.reader(file, delimiter=_delimiter(path)), [])
    twice = next((name for name in header if name and header.count(name) > 1), None)
    return None if twice is None else f"{path}: the column {twice!r} occurs {header.count(twice)} times. Rename one."


def _delimiter(path: Path) -> str:
    return "\t" if path.suffix == ".tsv" else ","


def _check_csv(path: Path) -> str | None:
    reader = csv.reader(read_text(path).splitlines(keepends=True), delimiter=_delimiter(path))
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


_CHECKS: dict[str, Callable[[Path], str | None]] = {"csv": _check_csv}
