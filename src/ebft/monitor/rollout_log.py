"""The rollouts of every training step with their rewards: a file in the output folder, and functions of the user."""

from __future__ import annotations

import copy
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterable
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

from ebft.monitor.run_files import remove_from_step, set_aside
from ebft.run_files import ROLLOUTS as FILE

_MAX_BYTES, _OLDER_FILES = 64 * 2**20, 3


class RolloutLog:
    """Appends entries to `rollouts.jsonl`, one JSON object per line; process r > 0 to `rollouts-rank<r>.jsonl`.

    A file of 64 MiB is renamed to `rollouts.jsonl.1`, and so on; the three newest of these are kept. The folder is
    created when the first entry is written. The `step` of an entry is that of the log of its update: the first is 1. A
    file that cannot be written gives one warning, and training continues. When a run resumes, `continue_from` removes
    the entries of the steps that it repeats.
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
            self._warn(error)

    def continue_from(self, step: int) -> None:
        """Remove the entries of steps after `step`; at step 0, move the files to a folder in `previous` instead."""
        if self._handler is not None:
            self._handler.close()
            self._handler = None
        files = [self.path, *self.path.parent.glob(f"{self.path.name}.[0-9]*")]
        try:
            if step == 0:
                set_aside(self.path.parent, files)
            else:
                for path in files:
                    remove_from_step(path, step + 1)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            warnings.warn(f"{self.path} cannot be written ({error}), so it lacks rollouts.", stacklevel=3)


class ScoredRollouts:
    """Passes the rollouts of a trainer's training steps to `hooks`, and with `log_completions` to `rollouts.jsonl`.

    A hook is called as `hook(rollouts, rewards)`, with copies of the entries of the log, a list of dicts, and of the
    total rewards of this process's rollouts, in the shape that the trainer documents.
    """

    def __init__(self, trainer: Trainer) -> None:
        args = trainer.args
        self.hooks: list[Callable[[list[dict[str, Any]], Tensor], None]] = []
        self._has_warned = False
        self._log = None
        if args.log_completions:
            self._log = RolloutLog(args.output_dir, args.process_index)
            trainer.add_callback(_ContinueLog(self._log))

    def __call__(self, rollouts: Callable[[], Iterable[dict[str, Any]]], rewards: Tensor) -> None:
        """Pass on the entries that `rollouts()` yields; it is not called if nobody receives them."""
        if self._log is None and not self.hooks:
            return
        entries = list(rollouts())
        if self._log is not None:
            self._log.write(entries)
        for hook in self.hooks:
            given = rewards.clone()
            hook(copy.deepcopy(entries), given)
            if not self._has_warned and not torch.equal(given, rewards):
                self._has_warned = True
                warnings.warn(
                    f"{getattr(hook, '__qualname__', hook)} changed the rewards, which has no effect on training: it "
                    "gets a copy. Functions that give rewards are listed in trl.reward_funcs.",
                    stacklevel=2,
                )


class _ContinueLog(TrainerCallback):
    def __init__(self, log: RolloutLog) -> None:
        self._log = log

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._log.continue_from(state.global_step)


class _Handler(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        raise sys.exc_info()[1]  # logging would print it for every record
