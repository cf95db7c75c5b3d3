"""The file that a server writes to, and its last lines."""

import shlex
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, TextIO

from ebft.errors import ConfigError

TAIL_LINES = 20
TAIL_BYTES = 65536
# What a dying server writes last, and says nothing of why it dies.
_NOISE = ("nanobind:", " - leaked ", "resource_tracker", "(...)")
PAUSE = 0.2  # seconds between two looks


class ServerLog:
    """Appends to one file; `tail` and `follow` see what the present start of the server wrote."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start = 0

    def open(self, command: Sequence[str]) -> BinaryIO:
        """The file, opened for the server, with the command that can be run again as its first line."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("ab")
        except OSError as error:
            raise ConfigError(
                f"The server's log {self.path} cannot be written ({error.strerror}). Choose another output_dir."
            ) from None
        file.write(f"$ {shlex.join(command)}\n".encode())
        file.flush()
        self.start = file.tell()
        return file

    def tail(self) -> str:
        """The last lines, indented, with the name of the file in front."""
        with self.path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(self.start, end - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        lines = [line for line in lines if not any(noise in line for noise in _NOISE)][-TAIL_LINES:]
        if not lines:
            return f"It wrote nothing to its log {self.path}."
        return "\n  ".join([f"The end of its log {self.path}:", *lines])

    def follow(self, stream: TextIO, ended: threading.Event) -> None:
        """Copy what is written from the present start on to `stream`, until `ended` is set and all is copied."""
        with self.path.open("r", encoding="utf-8", errors="replace") as file:
            file.seek(self.start)
            while True:
                last = ended.wait(PAUSE)
                stream.write(file.read())
                stream.flush()
                if last:
                    return
