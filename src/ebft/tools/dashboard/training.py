"""Training in a process of its own, whose output goes to a file: it and its dashboard do not depend on each other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static

from ebft.errors import RunError
from ebft.files import is_free
from ebft.processes import TYPED
from ebft.run_files import LOG


class Training:
    """The process of `ebft train ARGUMENTS` in its own session, with its console output appended to train.log.

    It goes on if this process ends. `interrupts` is the number of times that it was interrupted from here.
    """

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        self.log = folder / LOG
        self.interrupts = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not is_free(self.log, b"--- "):
                raise RunError(f"{self.log} is not the log of a run, and is kept. Set output_dir to another folder.")
            with self.log.open("ab") as log:
                log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} ebft train {' '.join(arguments)}\n".encode())
                self._log_start = log.tell()
                log.flush()
                self._process = subprocess.Popen(
                    [sys.executable, "-u", "-m", "ebft", "train", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", TYPED: json.dumps(_typed(arguments))},
                )
        except OSError as error:
            raise RunError(f"Training cannot be started with its log in {self.log} ({error}).") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_running(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def interrupt(self) -> None:
        """Do what Ctrl-C does in its terminal: stop after the step with a checkpoint, the second time immediately."""
        self.interrupts += 1
        if self.is_running():
            self._process.send_signal(signal.SIGINT)

    def wait(self) -> int:
        """Wait for the process; Ctrl-C interrupts it. Returns its exit status, 128 + n after signal n."""
        while True:
            try:
                status = self._process.wait()
                return status if status >= 0 else 128 - status
            except KeyboardInterrupt:
                self.interrupt()

    def output(self, lines: int) -> list[str]:
        """The last lines of its output."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - 2**16))
                text = log.read().decode("utf-8", errors="replace")
        except OSError:
            return []
        found = [line.rpartition("\r")[2] for line in text.split("\n")]
        return [line for line in found if line.strip()][-lines:]


def _typed(arguments: Sequence[str]) -> list[str]:
    """The command that starts the training with its dashboard, which is how it is resumed."""
    config, *others = arguments
    return ["ebft", "train", config, "--tui", *others]


_QUESTION = """\
[b]Training is running.[/b]

[b]l[/b]  leave it running and close the dashboard
[b]s[/b]  stop it after this step, with a checkpoint
[b]c[/b]  go back (also Escape)"""


class LeaveDialog(ModalScreen[str]):
    """Asks whether to leave ("leave") or stop ("stop") the training, or to go back ("back")."""

    DEFAULT_CSS = """
    LeaveDialog { align: center middle; }
    LeaveDialog Vertical { width: 56; height: auto; padding: 1 2; border: round $warning; background: $surface; }
    """
    BINDINGS: ClassVar[list[Any]] = [
        Binding("l", "dismiss('leave')", "Leave"),
        Binding("s", "dismiss('stop')", "Stop"),
        Binding("c,escape,q", "dismiss('back')", "Back"),
    ]

    def compose(self) -> ComposeResult:
        yield Vertical(Static(_QUESTION))
