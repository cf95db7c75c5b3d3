"""The log file of a server, and its last lines."""

import shlex
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, TextIO

from ebft.errors import ConfigError
from ebft.paths import is_free

TAIL_LINES = 20
TAIL_BYTES = 65536
# Uninformative lines that a server writes when it exits.
_NOISE = ("nanobind:", " - leaked ", "resource_tracker", "(...)")
PAUSE = 0.2  # polling interval in seconds


class ServerLog:
    """A log file that each start of the server appends to; `tail` and `follow` read the part of the current start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start = 0

    def open(self, command: Sequence[str]) -> BinaryIO:
        """Open the file for a new start of the server and write the command as the first line.

        Raises ConfigError if the file is not writable.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not is_free(self.path, b"$ "):
                raise ConfigError(f"{self.path} is not the log of a server, and is kept. Choose another output_dir.")
            file = self.path.open("ab")
        except OSError as error:
            raise ConfigError(
                f"Cannot write the server's log {self.path} ({error.strerror}). Choose another output_dir."
            ) from None
        file.write(f"$ {shlex.join(command)}\n".encode())
        file.flush()
        self.start: int = file.tell()
        return file

    def tail(self) -> str:
        """Return the last lines, indented, preceded by the path of the file."""
        with self.path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(self.start, end - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        lines = [line for line in lines if not any(noise in line for noise in _NOISE)][-TAIL_LINES:]
        if not lines:
            return f"Its log {self.path} is empty."
        return "\n  ".join([f"Last lines of its log {self.path}:", *lines])

    def follow(self, stream: TextIO, ended: threading.Event) -> None:
        """Copy the log of the current start to `stream` until `ended` is set and everything has been copied."""
        with self.path.open("r", encoding="utf-8", errors="replace") as file:
            file.seek(self.start)
            while True:
                last = ended.wait(PAUSE)
                stream.write(file.read())
                stream.flush()
                if last:
                    return
