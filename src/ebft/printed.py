"""What is printed: data must not control the terminal, and a reader that is gone must not end a run."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderHook
from rich.measure import Measurement
from rich.segment import Segment

BROKEN_PIPE = 128 + 13  # as shells report a command that SIGPIPE ended
# Characters that change the order in which the following text is displayed, with their names.
_DIRECTIONS = {
    **dict(zip(range(0x202A, 0x202F), ("LRE", "RLE", "PDF", "LRO", "RLO"))),
    **dict(zip(range(0x2066, 0x206A), ("LRI", "RLI", "FSI", "PDI"))),
}
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return `text` with control characters as visible symbols; a completion must not control the terminal.

    Characters that override the direction of text are replaced by their names, such as `<RLO>`.
    """
    return _UNPRINTABLE.sub(lambda found: _visible(ord(found[0])), text)


def printable_json(text: str) -> str:
    """JSON with control characters in its strings as escapes, which readers convert back."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _visible(code: int) -> str:
    if code in _DIRECTIONS:
        return f"<{_DIRECTIONS[code]}>"
    return chr(0x2400 + code) if code < 32 else "\u2421" if code == 127 else "\ufffd"


def say(text: object = "", err: bool = False) -> None:
    """Print a line with control characters as visible symbols, to stderr if `err`."""
    print(printable(str(text)), file=sys.stderr if err else sys.stdout, flush=True)


def safe_console(**options: Any) -> Console:
    """A console of rich that prints control characters in texts as visible symbols; its styles are unchanged."""
    made = Console(**options)
    made.push_render_hook(_Printable())
    return made


class _Printable(RenderHook):
    def process_renderables(self, renderables: list[RenderableType]) -> list[RenderableType]:
        return [_Filtered(renderable) for renderable in renderables]


class _Filtered:
    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._renderable)


class OutputError(BaseException):
    """The standard output of a command cannot be written, and the command has no other result."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"The standard output cannot be written: {error.strerror}.")
        self.is_broken_pipe = error.errno == errno.EPIPE


_goes_on = False  # whether the command that runs has another result than what it prints


def go_on_without_output() -> None:
    """Discard what cannot be printed from now on, with one warning, instead of raising OutputError."""
    global _goes_on
    _goes_on = True


def open_streams() -> None:
    """Replace sys.stdout and sys.stderr with streams that do not raise OSError, and open those that are closed.

    Files that are opened later would otherwise get the numbers of closed streams, and contain what is printed.
    """
    closed = [number for number in range(3) if not _is_open(number)]
    for number in closed:
        _discard(number)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (for the whole process)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        buffer = getattr(stream, "buffer", None)
        if stream is None or isinstance(getattr(buffer, "raw", buffer), io.FileIO):  # unbuffered, it has no `raw`
            setattr(sys, name, _opened(number, stream, number in closed))


def _opened(number: int, stream: io.TextIOWrapper | None, was_closed: bool) -> io.TextIOWrapper:
    options = {"encoding": "utf-8"}
    if stream is not None:
        stream.flush()
        options = {name: getattr(stream, name) for name in ("encoding", "line_buffering", "write_through")}
    raw = _Lasting(number, was_closed)
    # Names of files and texts can contain characters that the encoding of the terminal lacks.
    buffer = raw if options.get("write_through") else io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, errors="backslashreplace", **options)


class _Lasting(io.FileIO):
    """A stream of the process that is discarded from the first error on, such as that of a closed pipe."""

    def __init__(self, number: int, was_closed: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self._was_closed = was_closed

    def write(self, data: Any) -> int | None:
        try:
            if self._was_closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            return super().write(data)
        except OSError as error:
            self._was_closed = False
            _discard(self.fileno())
            if self.fileno() == 1 and not _goes_on:
                raise OutputError(error) from None
            if self.fileno() == 1:
                say(f"Warning: {OutputError(error)} The command continues without it.", err=True)
            return len(memoryview(data).cast("B"))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _discard(number: int) -> None:
    """Let what is written to a descriptor be lost, also by libraries and processes that use it directly."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)
    os.set_inheritable(number, True)
