"""A file with the rollouts of every training step and their rewards, in a run's output folder."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterable
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

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

    @classmethod
    def of(cls, args: Any) -> RolloutLog:
        """Return the log of a run with these training arguments."""
        return cls(args.output_dir, args.process_index)

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


class _Handler(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        raise sys.exc_info()[1]  # logging would print it for every record
