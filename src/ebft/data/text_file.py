"""A text file read whole, as UTF-8 or not at all."""

from pathlib import Path

from ebft.errors import DataError


def read_text(path: Path) -> str:
    """A file's text as UTF-8; DataError names the file and the line of the first bad byte."""
    try:
        data = path.read_bytes()
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: not UTF-8 text (byte {data[error.start]:#04x} at offset {error.start}). "
            "Convert the file to UTF-8 or leave it out."
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from error
