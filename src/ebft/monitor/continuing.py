"""Files of a run when it continues from a checkpoint, or when another run starts in the same output folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from ebft.dashboard.files import EVALUATION, HEALTH, METRICS, PREVIOUS, REPORT, RUN, parse, read_object, rollout_files

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
