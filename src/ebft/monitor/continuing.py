"""Files of a run when it continues from a checkpoint, or when another run starts in the same output folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from ebft.dashboard.files import HEALTH, LOG, METRICS, PREVIOUS, REPORT, RUN, parse, rollout_files

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


def set_aside(folder: Path, files: Iterable[Path]) -> None:
    """Move existing `files` to the folder `previous` inside `folder`, replacing those of an earlier run there."""
    for path in files:
        if path.is_file():
            (folder / PREVIOUS).mkdir(exist_ok=True)
            os.replace(path, folder / PREVIOUS / path.name)


def set_run_aside(folder: Path) -> None:
    """Move all files of an earlier run in `folder`, apart from its log, to the folder `previous`."""
    found = [folder / name for name in (METRICS, RUN, HEALTH, REPORT)] + rollout_files(folder)
    if not any(path.is_file() for path in found):
        return
    previous = folder / PREVIOUS
    for path in (*(previous / name for name in (METRICS, RUN, HEALTH, REPORT, LOG)), *rollout_files(previous)):
        path.unlink(missing_ok=True)
    set_aside(folder, found)
