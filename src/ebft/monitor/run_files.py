"""The files that describe a run while it runs: its state in `run.json`, metrics in `metrics.jsonl`, rollouts.

Any process can follow the run by reading them (ebft/run_files.py). A file that cannot be written gives one warning, and
training continues.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields
from itertools import islice
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from transformers import Trainer, TrainerCallback

from ebft import run_files as files
from ebft.errors import warn
from ebft.files import append_line, write_text

State = Literal["running", "finished", "stopped", "failed"]
# Among the `stateful_callbacks` of a trainer state: the evaluation of this step was not finished when it was saved.
PENDING_EVALUATION = "PendingEvaluation"
_SECONDS_BETWEEN_UPDATES = 1.0  # of run.json, if nothing is logged


class RunFiles(TrainerCallback):
    """Writes the files of a run from its main process; `start`, `begin` and `end` are called by the run.

    `description` is added to run.json: JSON values such as the method and the config. `metrics.jsonl` has one line per
    log of the trainer, including evaluations: `{"step": ..., "time": ..., metrics}`, with null for NaN and infinite
    values. Steps are finished optimizer steps, times are in seconds since 1970.

    The files of an earlier run in the folder are left as they are until training begins: the state before that is in
    `start.json`, and a run that does not resume then moves them to a folder in `previous`.
    """

    def __init__(self, folder: str | Path, description: dict[str, Any]) -> None:
        self._folder = Path(folder)
        self._run: dict[str, Any] = {"state": "running", "pid": os.getpid(), "host": socket.gethostname()}
        self._run |= {"started": None, "updated": None, "global_step": 0, "max_steps": None}
        self.description = description
        self._path = self._folder / files.RUN
        self._last_update = 0.0
        self._has_failed = False

    def start(self) -> None:
        """Write run.json or, if the folder has files of an earlier run, start.json."""
        self._run["started"] = time.time()
        self._path = self._folder / (files.START if has_records(self._folder) else files.RUN)
        self._update()

    def end(self, state: State, error: str | None = None) -> bool:
        """Write the final state of the run. Returns False if the run.json of an earlier run was left unchanged."""
        is_unchanged = self._path.name == files.START
        if is_unchanged and state == "finished":
            self._try(self._path.unlink, True)
            return False
        self._run["state"] = state
        if error is not None:
            self._run["error"] = error
        self._update()
        return not is_unchanged

    def restore(self, state: Any) -> None:
        """Take the progress from the state of a run that is complete; a finished run's run.json is left unchanged."""
        self._run |= {"global_step": state.global_step, "max_steps": state.max_steps}
        if (files.read_object(self._folder / files.RUN) or {}).get("state") != "finished":
            self._use_run_file()

    def begin(self, state: Any, previous: Path | None = None) -> None:
        """Remove the lines of what a resumed run repeats, and move the evaluation of its model away.

        At step 0, move the files of an earlier run away: to `previous`, by default a new folder in `previous`.
        """
        self._run |= {"global_step": state.global_step, "max_steps": state.max_steps}
        if state.global_step > 0:
            self._run["resumed_from_step"] = state.global_step
            is_evaluated = PENDING_EVALUATION not in state.stateful_callbacks
            for name in (files.METRICS, files.HEALTH):
                self._try(remove_from_step, self._folder / name, state.global_step + 1, is_evaluated)
            of_model = self._folder / files.EVALUATION  # which is trained further
            self._try(set_aside, self._folder, [of_model])
        elif self._path.name == files.START:
            # Apart from its log.
            names = (files.METRICS, files.RUN, files.HEALTH, files.REPORT, files.EVALUATION)
            of_run = [*(self._folder / name for name in names), *files.rollout_files(self._folder)]
            self._try(set_aside, self._folder, of_run, previous)
        self._use_run_file()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run["global_step"] = state.global_step
        if time.monotonic() - self._last_update > _SECONDS_BETWEEN_UPDATES:
            self._update()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs:
            values = {name: _as_json(value) for name, value in logs.items() if name not in ("step", "time")}
            line = json.dumps({"step": state.global_step, "time": round(time.time(), 3), **values}, allow_nan=False)
            self._try(append_line, self._folder / files.METRICS, line)
        self._run["global_step"] = state.global_step
        self._update()

    def _use_run_file(self) -> None:
        self._path = self._folder / files.RUN
        self._update()
        self._try((self._folder / files.START).unlink, True)

    def _update(self) -> None:
        self._last_update = time.monotonic()
        self._run["updated"] = time.time()
        text = json.dumps(self._run | self.description, indent=1) + "\n"
        self._try(write_text, self._path, text, False)

    def _try(self, write: Any, *arguments: Any) -> None:
        try:
            write(*arguments)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                warn(f"The files in {self._folder} that describe the run will not be complete ({error}).")


class RunFilesCallback(TrainerCallback):
    """Writes the files of a run to the output folder of any trainer, for `ebft report`, `ebft show` and `ebft tui`.

    `Trainer(..., callbacks=[RunFilesCallback()])`. `ebft.train` and `ebft train` write them without it. The files of an
    earlier run in the folder are moved to `previous`. A run that ends with an exception, or is killed, has no final
    state: it is shown as ended once its process has.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            written = RunFiles(args.output_dir, _description(args, model))
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
            written.start()
            written.begin(state)
            self.on_step_end, self.on_log = written.on_step_end, written.on_log
            self.on_train_end = lambda *_, **__: written.end("finished") and None


def _description(args: Any, model: Any) -> dict[str, Any]:
    """What run.json contains of a trainer that was built in Python: as of a config, as far as the arguments tell."""
    values = args.to_dict()  # without tokens
    options = {name: values[name] for name in ("use_whitening",) if name in values}
    config = {name: values[name] for name in ("log_rollouts", "eval_strategy") if name in values}
    if options:
        config |= {"rl": "ebft", "ebft": options | {"mode": "strided" if "stride" in values else "structured"}}
    elif "num_generations" in values:
        config["rl"] = "grpo"
    defaults = {option.name: option.default for option in fields(args)}
    changed = {name: value for name, value in values.items() if name in defaults and value != defaults[name]}
    return {
        "method": type(args).__name__.removesuffix("Config"),
        "model": getattr(getattr(model, "config", None), "name_or_path", None) or type(model).__name__,
        "output_dir": str(args.output_dir),
        "config": config,
        "changed": {name: _as_json(value) for name, value in changed.items()},
    }


def _as_json(value: Any) -> Any:
    if hasattr(value, "item"):  # numpy and torch scalars
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, int | str | None) else str(value)


def remove_from_step(path: Path, step: int, is_evaluated: bool = True) -> None:
    """Remove the lines of `step` and later ones from a JSON Lines file, and lines that cannot be read.

    A run that resumes from an earlier step repeats them, and the evaluation before `step` unless it `is_evaluated`. The
    file is replaced as a whole, and deleted if no line remains. A missing file is not an error; others raise OSError.
    """

    def is_kept(line: bytes) -> bool:
        value = (files.parse(line) or {}).get("step")
        is_before = isinstance(value, int | float) and value < step - (not is_evaluated and b'"eval_' in line)
        return is_before and line.endswith(b"\n")

    with suppress(FileNotFoundError):
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if is_kept(line)]
        if kept and len(kept) < len(lines):
            write_text(path, b"".join(kept).decode(), is_flushed=False)
        elif lines and not kept:
            path.unlink()


def set_aside(folder: Path, paths: Iterable[Path], target: Path | None = None) -> Path | None:
    """Move existing `paths` of `folder` to `target`, by default a new `previous/1`, `previous/2`, ... inside `folder`.

    Paths keep their place below the folder. Returns the target, or None if no path exists. What is in the folders of
    earlier runs is never replaced. Raises OSError, with all paths where they were, if one cannot be moved.
    """
    found = [path for path in paths if path.exists()]
    if not found:
        return None
    target = target or _new_previous(folder / files.PREVIOUS)
    moved: list[tuple[Path, Path]] = []
    try:
        for path in found:
            to = target / path.relative_to(folder)
            to.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, to)
            moved.append((path, to))
    except OSError:
        for path, to in reversed(moved):
            os.replace(to, path)
        raise
    return target


def has_records(folder: Path) -> bool:
    """Whether `folder` has files of a run that has begun to train, or was complete when it started."""
    records = (folder / name for name in (files.METRICS, files.HEALTH, files.EVALUATION))
    if any(path.is_file() for path in records) or files.rollout_files(folder):
        return True
    run = files.read_object(folder / files.RUN) or {}
    return run.get("state") == "finished" or bool(run.get("global_step"))


def _new_previous(parent: Path) -> Path:
    parent.mkdir(exist_ok=True)
    number = max((int(path.name) for path in parent.iterdir() if path.name.isdigit()), default=0)
    while True:  # other processes of the run may take the same number
        number += 1
        try:
            (parent / str(number)).mkdir()
        except FileExistsError:
            continue
        return parent / str(number)


class RolloutLog(TrainerCallback):
    """Appends entries to `rollouts.jsonl`, one JSON object per line; process r > 0 to `rollouts-rank<r>.jsonl`.

    A file of 64 MiB is renamed to `rollouts.jsonl.1`, and so on; the three newest of these are kept. The folder is
    created when the first entry is written. The `step` of an entry is where its update is logged: the first is 1.
    A file that cannot be written gives one warning, and training continues. When a run resumes, `continue_from` removes
    the entries of the steps that it repeats.
    """

    def __init__(self, folder: str | Path, rank: int = 0, max_bytes: int = 64 * 2**20, *, processes: int = 1) -> None:
        self.path = Path(folder) / (files.ROLLOUTS if rank == 0 else f"rollouts-rank{rank}.jsonl")
        self._rank, self._processes, self._max_bytes = rank, processes, max_bytes
        self._handler: _Handler | None = None
        self._has_failed = False

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append `rows`, and write them to the disk."""
        try:
            if self._handler is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._handler = _Handler(self.path, "a", self._max_bytes, backupCount=3, encoding="utf-8", delay=True)
            for row in rows:
                line = json.dumps(row, ensure_ascii=False, default=str)
                self._handler.emit(logging.LogRecord("", logging.INFO, "", 0, line, (), None))
        except OSError as error:
            self._warn(error)

    def close(self) -> None:
        """Close the file; `write` opens it again."""
        if self._handler is not None:
            self._handler.close()
            self._handler = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.continue_from(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def continue_from(self, step: int) -> None:
        """Remove entries after `step`; at step 0, move the files away, also of processes that the run no longer has."""
        self.close()
        paths = [self.path, *self.path.parent.glob(f"{self.path.name}.[0-9]*")]
        if self._rank == 0:
            own = {f"rollouts-rank{rank}" for rank in range(1, self._processes)} | {"rollouts"}
            others = files.rollout_files(self.path.parent)
            paths += [path for path in others if path.name.partition(".")[0] not in own]
        try:
            if step == 0:
                set_aside(self.path.parent, paths)
            else:
                for path in paths:
                    remove_from_step(path, step + 1)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            warn(f"{self.path} cannot be written ({error}), so it lacks rollouts.")


class ScoredRollouts:
    """Passes the rollouts of a trainer's training steps to `hooks`, and what `log_rollouts` names to a file.

    A hook is called as `hook(rollouts, rewards)`, with copies of the entries of the log, a list of dicts, and of the
    total rewards of this process's rollouts, in the shape that the trainer documents.
    """

    def __init__(self, trainer: Trainer) -> None:
        args = trainer.args
        self.hooks: list[Callable[[list[dict[str, Any]], Tensor], None]] = []
        self._trainer = trainer
        self._logs_all = args.log_rollouts == "all" or bool(args.log_completions)
        self._last_step: int | None = None  # that few rollouts of are in the log
        self._log = None
        if self._logs_all or (args.log_rollouts == "few" and args.process_index == 0):
            self._log = RolloutLog(args.output_dir, args.process_index, processes=args.world_size)
            trainer.add_callback(self._log)

    def __call__(self, rollouts: Callable[[], Iterable[dict[str, Any]]], rewards: Tensor) -> None:
        """Pass on the entries that `rollouts()` yields; it is not called if nobody receives them."""
        is_logged = self._log is not None and (self._logs_all or self._is_due())
        if not is_logged and not self.hooks:
            return
        is_whole = self._logs_all or self.hooks
        entries = list(rollouts() if is_whole else islice(rollouts(), _FEW_ENTRIES))
        if is_logged:
            logged = entries if self._logs_all else [dict(entry) for entry in entries[:_FEW_ENTRIES]]
            for entry in () if self._logs_all else logged:  # a few blocks of the document, evenly spread
                if blocks := entry.get("blocks"):
                    entry["blocks"] = blocks[:: max(1, math.ceil(len(blocks) / _FEW_BLOCKS))]
            self._log.write(logged)
        for hook in self.hooks:
            hook(copy.deepcopy(entries), rewards.clone())

    def _is_due(self) -> bool:
        """Whether few rollouts of the current step are logged: at the first step, and then at evenly spread ones."""
        state = self._trainer.state
        apart = max(1, state.logging_steps, math.ceil(state.max_steps / _FEW_STEPS))
        step, last = state.global_step + 1, self._last_step
        if last is not None and last <= step < last + apart:
            return False
        self._last_step = step
        return True


_FEW_STEPS, _FEW_ENTRIES, _FEW_BLOCKS = 100, 2, 4


class _Handler(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        raise sys.exc_info()[1]  # logging would print it for every record
