"""Reading of text files, which must be UTF-8."""

from pathlib import Path

from ebft.errors import DataError


def read_text(path: Path) -> str:
    """The text of a UTF-8 file. Raises DataError with the file and the line of the first invalid byte."""
    try:
        data = path.read_bytes()
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: not valid UTF-8 (byte {data[error.start]:#04x} at offset {error.start}). "
            "Convert the file to UTF-8 or leave it out."
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from error
