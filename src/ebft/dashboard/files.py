"""The files that a run writes into its output folder, and reading those that grow while they are read."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

METRICS = "metrics.jsonl"  # one line per log or evaluation: step, time (seconds since 1970), metrics
RUN = "run.json"  # state, process, progress, config and versions of the run
ROLLOUTS = "rollouts.jsonl"  # with log_completions; older parts are rollouts.jsonl.1 and so on
HEALTH = "health.jsonl"  # one line per health message: time, step, since, name, message, remedy
LOG = "train.log"  # console output of a run started with `ebft train --tui`
REPORT = "report.html"
EVALUATION = "evaluation.json"  # the --output of `ebft evaluate`, for the report
START = "start.json"  # as run.json, of a run in the folder of an earlier one that has not begun to train
PREVIOUS = "previous"  # folders 1, 2, ... with the files of earlier runs in the same output folder
CARD = "README.md"  # the model card

# What is pushed to the Hub of the files at the top of a checkpoint or of the final model, besides the model card:
# weights, adapter, their configs, tokenizer and chat template, and the Python code of models that come with their own.
MODEL_FILES = (
    *("config.json", "generation_config.json", "adapter_config.json"),
    *("model.safetensors", "model-*.safetensors", "adapter_model.safetensors", "*.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model-*.bin", "pytorch_model.bin.index.json", "adapter_model.bin"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "vocab.txt", "*.model", "*.tiktoken", "chat_template.jinja", "*.py"),
)
# Files of a checkpoint that are not pushed with hub_strategy: checkpoint and all_checkpoints, since resuming does not
# read them: a pickle of all settings with the paths of this machine, and PEFT's card with the path of the base model.
LEFT_OUT = ("training_args.bin", CARD)

_CHUNK = 8 * 2**20
_ROLLOUTS = re.compile(r"rollouts(-rank\d+)?\.jsonl(\.\d+)?")  # not the .part of a file that is being rewritten


class Tail:
    """Reads the complete lines that were appended to a file since the last call.

    A last line without a line break is left for a later call. A file that was replaced, or is now shorter, is read from
    its start again. With `newest_bytes`, reading starts at the first line within that many bytes of the end.
    """

    def __init__(self, path: Path, newest_bytes: int | None = None) -> None:
        self.path = path
        self._newest_bytes = newest_bytes
        self._offset, self._inode = 0, None

    def read(self) -> tuple[list[str], bool]:
        """Return the new lines, and whether they replace everything that was read before.

        At most 8 MiB are read in a call. A missing file has no lines.
        """
        try:
            with _open(self.path) as file:
                status = os.fstat(file.fileno())
                restarts = status.st_ino != self._inode or status.st_size < self._offset
                if restarts:
                    self._inode, self._offset = status.st_ino, self._start(file, status.st_size)
                file.seek(self._offset)
                chunk = file.read(_CHUNK)
        except OSError:
            restarts, self._inode, self._offset = self._inode is not None, None, 0
            return [], restarts
        complete, found, _ = chunk.rpartition(b"\n")
        self._offset += len(complete) + len(found)
        return complete.decode("utf-8", errors="replace").split("\n") if found else [], restarts

    def _start(self, file: Any, size: int) -> int:
        if self._newest_bytes is None or size <= self._newest_bytes:
            return 0
        file.seek(size - self._newest_bytes)
        file.readline()  # the rest of a line
        return file.tell()


class JsonTail:
    """The objects appended to a JSON Lines file since the last call; `corrupted` counts lines that are not objects."""

    def __init__(self, path: Path, newest_bytes: int | None = None) -> None:
        self._tail = Tail(path, newest_bytes)
        self.corrupted = 0

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the new objects, and whether they replace everything that was read before."""
        lines, restarts = self._tail.read()
        if restarts:
            self.corrupted = 0
        found = [parse(line) for line in lines if line.strip()]
        self.corrupted += found.count(None)
        return [row for row in found if row is not None], restarts


def _open(path: Path) -> BinaryIO:
    """A regular file, for reading. Raises OSError for others, such as named pipes, whose reading may never end."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return open(descriptor, "rb")


def parse(line: str | bytes) -> dict[str, Any] | None:
    """The object in a line, or None if there is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: nested too deeply
        return None
    return row if isinstance(row, dict) else None


def read_object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None if the file is missing or has none."""
    try:
        with _open(path) as file:
            return parse(file.read())
    except OSError:
        return None


def read_all(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a JSON Lines file, without corrupted lines; none if the file cannot be read."""
    try:
        with _open(path) as file:
            for line in file:
                row = parse(line)
                if row is not None:
                    yield row
    except OSError:
        return


def rollout_files(folder: Path) -> list[Path]:
    """The files with the rollouts of a run, oldest first; those of other processes than the main one at the end."""
    found = [path for path in folder.glob("rollouts*.jsonl*") if _ROLLOUTS.fullmatch(path.name) and path.is_file()]
    return sorted(found, key=lambda path: (path.name.partition(".jsonl")[0], -_part(path)))


def _part(path: Path) -> int:
    number = path.name.rpartition(".")[2]
    return int(number) if number.isdigit() else 0
