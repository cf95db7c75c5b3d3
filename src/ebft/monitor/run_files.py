"""The files that describe a run while it runs: its state in `run.json`, its metrics in `metrics.jsonl`.

Any process can follow the run by reading them. A file that cannot be written gives one warning, and training continues.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from transformers import TrainerCallback

from ebft.run_files import EVALUATION, HEALTH, METRICS, PREVIOUS, REPORT, RUN, START, parse, read_object, rollout_files

State = Literal["running", "finished", "stopped", "failed"]
_SECONDS_BETWEEN_UPDATES = 1.0  # of run.json, if nothing is logged


class RunFiles(TrainerCallback):
    """Writes the files of a run from its main process; `start` and `end` are called by the run, the rest by a trainer.

    `description` is added to run.json: JSON values such as the method and the config. `metrics.jsonl` has one line per
    log of the trainer, including evaluations: `{"step": ..., "time": ..., metrics}`, with null for NaN and infinite
    values. Steps are finished optimizer steps, times are in seconds since 1970.

    The files of an earlier run in the folder are left as they are until training begins: the state before that is in
    `start.json`, and a run that does not resume then moves them to a folder in `previous`.
    """

    def __init__(self, folder: str | Path, description: dict[str, Any]) -> None:
        self._folder = Path(folder)
        self._run = {
            "state": "running",
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": None,
            "updated": None,
            "global_step": 0,
            "max_steps": None,
        }
        self.description = description
        self._path = self._folder / RUN
        self._has_begun = False
        self._last_update = 0.0
        self._has_failed = False

    def start(self) -> None:
        """Write run.json or, if the folder has files of an earlier run, start.json."""
        self._run["started"] = time.time()
        self._path = self._folder / (START if has_records(self._folder) else RUN)
        self._update()

    def describe(self, **facts: Any) -> None:
        """Add JSON values to the description of the run, with its next update."""
        self.description = self.description | facts

    def end(self, state: State, error: str | None = None) -> bool:
        """Write the final state of the run. Returns False if the run.json of an earlier run was left unchanged."""
        is_unchanged = self._path.name == START
        if is_unchanged and state == "finished":
            self._try(_remove, self._path)
            return False
        self._run["state"] = state
        if error is not None:
            self._run["error"] = error
        self._update()
        return not is_unchanged

    def restore(self, state: Any) -> None:
        """Take the progress from the trainer state of a run that has no more steps to train.

        The run.json of one that was finished before is left unchanged.
        """
        self._run |= {"global_step": state.global_step, "max_steps": state.max_steps}
        if (read_object(self._folder / RUN) or {}).get("state") != "finished":
            self._use_run_file()

    def begin(self, state: Any, previous: Path | None = None) -> None:
        """Remove the lines of the steps that a resumed run repeats, and move the evaluation of its model away.

        At step 0, move the files of an earlier run away: to `previous`, by default a new folder in `previous`.
        """
        if self._has_begun:
            return
        self._has_begun = True
        self._run |= {"global_step": state.global_step, "max_steps": state.max_steps}
        if state.global_step > 0:
            self._run["resumed_from_step"] = state.global_step
            for name in (METRICS, HEALTH):
                self._try(remove_from_step, self._folder / name, state.global_step + 1)
            self._try(set_evaluation_aside, self._folder)
        elif self._path.name == START:
            self._try(set_run_aside, self._folder, previous)
        self._use_run_file()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begin(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run["global_step"] = state.global_step
        if time.monotonic() - self._last_update > _SECONDS_BETWEEN_UPDATES:
            self._update()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs:
            values = {name: _as_json(value) for name, value in logs.items() if name not in ("step", "time")}
            line = json.dumps({"step": state.global_step, "time": round(time.time(), 3), **values}, allow_nan=False)
            self._try(_append, self._folder / METRICS, line)
        self._run["global_step"] = state.global_step
        self._update()

    def _use_run_file(self) -> None:
        self._path = self._folder / RUN
        self._update()
        self._try(_remove, self._folder / START)

    def _update(self) -> None:
        self._last_update = time.monotonic()
        self._run["updated"] = time.time()
        self._try(_replace, self._path, json.dumps(self._run | self.description, indent=1) + "\n")

    def _try(self, write: Any, *arguments: Any) -> None:
        try:
            write(*arguments)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                warnings.warn(
                    f"The files that describe the run cannot be written to {self._folder} ({error}), so it cannot be "
                    "followed completely.",
                    stacklevel=2,
                )


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def _replace(path: Path, text: str) -> None:
    """Write a file so that readers see the old or the new content, never a part."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def _as_json(value: Any) -> Any:
    if hasattr(value, "item"):  # numpy and torch scalars
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, int | str | None) else str(value)


_STEP_FIRST = re.compile(rb'\{"step": (\d+)[,}]')  # as all files are written


def remove_from_step(path: Path, step: int) -> None:
    """Remove the lines of `step` and later ones from a JSON Lines file, and lines that cannot be read.

    A run that resumes from an earlier step repeats them. The file is replaced as a whole, and deleted if no line
    remains. A missing file is not an error; others raise OSError.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        lines, removed, kept = path.open("rb"), False, False
    except FileNotFoundError:
        return
    with lines, part.open("wb") as remaining:
        for line in lines:
            if line.endswith(b"\n") and _is_before(line, step):
                remaining.write(line)
                kept = True
            else:
                removed = True
    if kept and removed:
        os.replace(part, path)
        return
    part.unlink()
    if removed:
        path.unlink()


def _is_before(line: bytes, step: int) -> bool:
    found = _STEP_FIRST.match(line)
    if found:
        return int(found[1]) < step
    value = (parse(line) or {}).get("step")
    return isinstance(value, int | float) and value < step


def set_aside(folder: Path, paths: Iterable[Path], target: Path | None = None) -> Path | None:
    """Move existing `paths` of `folder` to `target`, by default a new `previous/1`, `previous/2`, ... inside `folder`.

    Paths keep their place below the folder. Returns the target, or None if no path exists. What is in the folders of
    earlier runs is never replaced. Raises OSError, with all paths where they were, if one cannot be moved.
    """
    found = [path for path in paths if path.exists()]
    if not found:
        return None
    target = target or _new_previous(folder / PREVIOUS)
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


def set_run_aside(folder: Path, target: Path | None = None) -> None:
    """Move the files that describe an earlier run in `folder`, apart from its log, to `target` as `set_aside` does."""
    names = (METRICS, RUN, HEALTH, REPORT, EVALUATION)
    set_aside(folder, [*(folder / name for name in names), *rollout_files(folder)], target)


def set_evaluation_aside(folder: Path) -> None:
    """Move the evaluation of the model that a resumed run trains further to a new folder in `previous`."""
    set_aside(folder, [folder / EVALUATION])


def has_records(folder: Path) -> bool:
    """Whether `folder` has files of a run that has begun to train, or was complete when it started."""
    if any((folder / name).is_file() for name in (METRICS, HEALTH, EVALUATION)) or rollout_files(folder):
        return True
    run = read_object(folder / RUN) or {}
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
