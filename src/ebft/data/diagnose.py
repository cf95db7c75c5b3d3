"""Finding the file and line on which a table reader failed: a second, slower pass after an error."""

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ebft.errors import cause
from ebft.files import read_text


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


def header_problem(path: Path) -> str | None:
    """What is wrong with the header of a CSV file: there is none, or a column twice, which its reader would rename."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        header = next((row for row in _rows(file, path) if row), None)
    if header is None:
        return f"{path}: the file is empty. Correct the file or leave it out."
    twice = next((name for name in header if name and header.count(name) > 1), None)
    return None if twice is None else f"{path}: the column {twice!r} occurs {header.count(twice)} times. Rename one."


def _delimiter(path: Path) -> str:
    return "\t" if path.suffix.lower() == ".tsv" else ","


def _rows(lines: Iterable[str], path: Path, strict: bool = False) -> Any:
    """The reader of the rows of a CSV file. Its limit of the size of a field is for the whole process."""
    csv.field_size_limit(2**31 - 1)
    return csv.reader(lines, delimiter=_delimiter(path), strict=strict)


def _check_csv(path: Path) -> str | None:
    reader, header, start, count = _rows(read_text(path).splitlines(keepends=True), path, strict=True), None, 1, 0
    try:
        for row in reader:
            if header is not None and len(row) > len(header):
                return f"{path}, line {reader.line_num}: {len(row)} fields, but the header has {len(header)}"
            count += bool(row) and header is not None
            header, start = (row or None) if header is None else header, reader.line_num + 1
    except csv.Error as error:
        return f"{path}, line {start}: the row that starts there has an open quote, or text after a quote ({error})"
    return f"{path}: there are no rows below the header" if not count else None


def _check_table(path: Path) -> str | None:
    """Parquet and Arrow files have no lines: the reader's message for this file alone."""
    import pyarrow.parquet

    try:
        if path.suffix.lower() == ".parquet":
            count = pyarrow.parquet.read_metadata(path).num_rows
        else:
            count = sum(len(batch) for batch in _arrow_batches(path))
    except (OSError, ValueError) as error:
        kind = "Parquet" if path.suffix.lower() == ".parquet" else "Arrow"
        return f"{path}: not a readable {kind} file ({cause(error)})"
    return None if count else f"{path}: the table has no rows"


def _arrow_batches(path: Path) -> Any:
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:
        try:
            reader = pa.ipc.open_stream(file)
        except ValueError:
            found = pa.ipc.open_file(file)
            return [found.get_batch(number) for number in range(found.num_record_batches)]
        return list(reader)


def _check_text(path: Path) -> None:
    read_text(path)  # raises


_CHECKS: dict[str, Callable[[Path], str | None]] = {
    "csv": _check_csv,
    "text": _check_text,
    "json": lambda path: None,  # its reader names the line itself
}
