"""The rollouts of every training step with their rewards: a file in the output folder, and functions of the user."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterable
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from torch import Tensor

FILE = "rollouts.jsonl"
_MAX_BYTES, _OLDER_FILES = 64 * 2**20, 3


class RolloutLog:
    """Appends entries to `rollouts.jsonl`, one JSON object per line; process r > 0 to `rollouts-rank<r>.jsonl`.

    A file of 64 MiB is renamed to `rollouts.jsonl.1`, and so on; the three newest of these are kept. The folder is
    created when the first entry is written. A file that cannot be written gives one warning, and training continues.
    """

    def __init__(self, folder: str | Path, rank: int = 0, max_bytes: int = _MAX_BYTES) -> None:
        self.path = Path(folder) / (FILE if rank == 0 else f"rollouts-rank{rank}.jsonl")
        self._max_bytes = max_bytes
        self._handler: _Handler | None = None
        self._has_failed = False

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append `rows`, and write them to the disk."""
        try:
            if self._handler is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._handler = _Handler(
                    self.path, maxBytes=self._max_bytes, backupCount=_OLDER_FILES, encoding="utf-8", delay=True
                )
            for row in rows:
                line = json.dumps(row, ensure_ascii=False, default=str)
                self._handler.emit(logging.LogRecord("", logging.INFO, "", 0, line, (), None))
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                warnings.warn(f"{self.path} cannot be written ({error}), so it lacks rollouts.", stacklevel=2)


class ScoredRollouts:
    """Passes the rollouts of each training step to `rollouts.jsonl`, with `args.log_completions`, and to `hooks`.

    A hook is called as `hook(rollouts, rewards)`: the entries of the log, a list of dicts, and the total rewards of
    this process's rollouts, in the shape that the trainer documents.
    """

    def __init__(self, args: Any) -> None:
        self.hooks: list[Callable[[list[dict[str, Any]], Tensor], None]] = []
        self._log = RolloutLog(args.output_dir, args.process_index) if args.log_completions else None

    def __call__(self, rollouts: Callable[[], Iterable[dict[str, Any]]], rewards: Tensor) -> None:
        """Pass on the entries that `rollouts()` yields; it is not called if nobody receives them."""
        if self._log is None and not self.hooks:
            return
        entries = list(rollouts())
        if self._log is not None:
            self._log.write(entries)
        for hook in self.hooks:
            hook(entries, rewards)


class _Handler(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        raise sys.exc_info()[1]  # logging would print it for every record
