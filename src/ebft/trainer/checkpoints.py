"""Checkpoints that are complete or absent: written to a staging folder, which is renamed."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import distributed
from transformers import logging

from ebft.errors import EBFTError, SaveError
from ebft.files import CHECKSUMS, STATE, discard, publish, remove_staged, write_checksums


@contextmanager
def saving(folder: Path, staged: Path, newest: Path, *, is_writer: bool) -> Iterator[None]:
    """Context manager in which whatever is raised deletes `staged`, and becomes a SaveError for `folder`.

    Libraries have no common class of errors for saving: tokenizers raises Exception if the disk is full, torch
    RuntimeError, transformers ValueError for what it does not write. Errors that follow from the end of another
    process are raised as they are. `newest`: the checkpoint that is left then, if it is there.
    """
    try:
        yield
    except SaveError:  # says itself what is left
        raise
    except Exception as error:
        if is_writer:
            remove_staged(staged)
        if isinstance(error, EBFTError) or _is_of_another_process(error):
            raise
        raise SaveError.of(folder, error, newest if newest.is_dir() else None) from error


def _is_of_another_process(error: Exception) -> bool:
    """Whether communication has failed because another process has ended."""
    words = ("gloo", "NCCL", "by peer", "process group", "Broken pipe")
    is_distributed = distributed.is_available() and distributed.is_initialized()
    return is_distributed and isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def complete(staged: Path, folder: Path, writers: Iterable[Callable[[Path], None]]) -> None:
    """Let `writers` add their files to a staged checkpoint, and move it to its folder; called on one process."""
    for write in writers:
        write(staged)
    write_checksums(staged)
    publish(staged, folder)


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """Context manager without the progress bars of transformers."""
    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows_progress:
            logging.enable_progress_bar()


def rotate(newest: Path, limit: int, best: str | None) -> None:
    """Delete the checkpoints of the lowest steps beside `newest` until `limit` are left; never `newest` or `best`.

    Folders that this package has not written are left, and so are checkpoints of later steps, which the run has not
    continued from, and those whose name is not that of their step. They do not count.
    """
    last = step_in_name(newest)
    steps = {folder: step_in_name(folder) for folder in newest.parent.glob("checkpoint-*")}
    earlier = sorted((step, folder) for folder, step in steps.items() if step is not None and step < last)
    own = [folder for step, folder in earlier if _is_own(folder, step)]
    kept = [folder for folder in own if best is not None and folder.name == Path(best).name]
    others = [folder for folder in own if folder not in kept]
    for folder in others[: max(0, len(others) + len(kept) + 1 - max(limit, len(kept) + 1))]:
        try:
            discard(folder)
        except OSError as error:
            warnings.warn(f"save_total_limit: {folder} cannot be deleted ({error}).", stacklevel=2)


def step_in_name(folder: Path) -> int | None:
    """The step in a name such as checkpoint-40; None for other names."""
    found = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    return None if found is None else int(found[1])


def _is_own(folder: Path, step: int) -> bool:
    """Whether this package has written the checkpoint `folder`, of `step`."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        return (folder / CHECKSUMS).is_file() and state["global_step"] == step
    except (OSError, ValueError, KeyError, TypeError):
        return False
