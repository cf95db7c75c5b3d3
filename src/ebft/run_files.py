"""The files in the output folder of a run: their names, reading them while they are written; the state of a run."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ebft.errors import RunError
from ebft.files import CHECKSUMS, RUN_FILE, STATE
from ebft.machine import is_alive

METRICS = "metrics.jsonl"  # one line per log or evaluation: step, time (seconds since 1970), metrics
RUN = "run.json"  # state, process, progress, config and versions of the run
ROLLOUTS = "rollouts.jsonl"  # those that log_rollouts names; older parts are rollouts.jsonl.1 and so on
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
# Records of a run at the top of its output folder or of a checkpoint: no part of the model beside them.
RECORDS = (
    *(RUN, METRICS, HEALTH, LOG, REPORT, EVALUATION, START, "rollouts*.jsonl*", "training_args.bin"),
    *(STATE, CHECKSUMS, RUN_FILE, "ebft_final.json"),
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

        At most 8 MiB are read in a call, more if a line is longer. A missing file has no lines.
        """
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                restarts = status.st_ino != self._inode or status.st_size < self._offset
                if restarts:
                    self._inode, self._offset = status.st_ino, self._start(file, status.st_size)
                file.seek(self._offset)
                chunk = file.read(_CHUNK)
                if len(chunk) == _CHUNK and b"\n" not in chunk:
                    chunk += file.readline()
        except OSError:
            restarts, self._inode, self._offset = self._inode is not None, None, 0
            return [], restarts
        complete, found, _ = chunk.rpartition(b"\n")
        self._offset += len(complete) + len(found)
        return complete.decode("utf-8", errors="replace").split("\n") if found else [], restarts

    def _start(self, file: Any, size: int) -> int:
        newest = size if self._newest_bytes is None else self._newest_bytes
        while newest < size:
            file.seek(size - newest)
            file.readline()  # the rest of a line
            if file.tell() < size:
                return file.tell()
            newest *= 2  # the last line is longer
        return 0


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
        return parse(path.read_bytes())
    except OSError:
        return None


def read_all(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a JSON Lines file, without corrupted lines; none if the file cannot be read."""
    try:
        with path.open("rb") as file:
            yield from (row for line in file if (row := parse(line)) is not None)
    except OSError:
        return


def rollout_files(folder: Path) -> list[Path]:
    """The files with the rollouts of a run, oldest first; files of other processes than the main one last."""
    found = [path for path in folder.glob("rollouts*.jsonl*") if _ROLLOUTS.fullmatch(path.name) and path.is_file()]
    part = lambda path: int(number) if (number := path.name.rpartition(".")[2]).isdigit() else 0
    return sorted(found, key=lambda path: (path.name.partition(".jsonl")[0], -part(path)))


def is_report(path: Path) -> bool:
    """Whether `path` is a report, or does not exist."""
    return not path.exists() or (path.is_file() and b"<title>ebft" in path.read_bytes()[:2000])


DERIVED = ("merged", "quantized")  # folders that commands write in an output folder by default, from its model
_INSIDE = re.compile(rf"checkpoint-\d+|{'|'.join(DERIVED)}")  # folders of models in an output folder


def check_run(folder: Path) -> None:
    """Raise RunError if `folder` is not the output folder of a run."""
    if not folder.is_dir():
        problem = "is a file, not a folder" if folder.exists() else "does not exist"
        raise RunError(f"{folder} {problem}. Give the output_dir of a run.")
    if not (folder / RUN).is_file() and not (folder / METRICS).is_file() and not rollout_files(folder):
        inside = sorted(path.parent.name for path in folder.glob(f"*/{RUN}"))
        meant = f" Runs in it: {', '.join(inside[:5])}{', ...' * (len(inside) > 5)}." if inside else ""
        raise RunError(
            f"{folder} has none of {RUN}, {METRICS} and {ROLLOUTS}, which `ebft train` writes to output_dir, and in "
            f"Python the callback ebft.RunFilesCallback. Give the output_dir of a run.{meant}"
        )


def check_rollouts(folder: Path) -> None:
    """Raise RunError if the run in `folder` has no log of rollouts, with the key that enables it."""
    check_run(folder)
    if rollout_files(folder):
        return
    run = read_run(folder)
    config = found if isinstance(found := run.get("config"), dict) else {}
    problem = ". Set log_rollouts: few, or all, in the config of the run to write it."
    if config and not samples_rollouts(config):
        problem = f": {run.get('method') or 'its method'} logs no rollouts."
    elif logs_rollouts(config):
        problem = f" yet: no step is complete (run: {state_of(run)})."
    raise RunError(f"{folder} has no {ROLLOUTS}{problem}")


def samples_rollouts(config: dict[str, Any]) -> bool:
    """Whether the method of a run with this config samples rollouts; SFT, preferences and reward models do not."""
    return config.get("rl") in ("ebft", "grpo", "gdpo")


def logs_rollouts(config: dict[str, Any]) -> bool:
    """Whether a run with this config writes rollouts to its folder."""
    return config.get("log_rollouts", "none") != "none"


def read_run(folder: Path) -> dict[str, Any]:
    """The content of run.json, or of start.json while a run starts; empty if it is missing or cannot be read."""
    start = read_object(folder / START) or {}
    return start if state_of(start) == "running" else read_object(folder / RUN) or {}


def settings_in_effect(run: dict[str, Any]) -> dict[str, Any]:
    """The options of a run that differ from their defaults, and options whose value a checkpoint restored.

    The latter have a note with the value of the config, which has no effect. `run`: the content of run.json.
    """
    changed, config, optimizer = (run.get(key) or {} for key in ("changed", "config", "optimizer"))
    restored = {
        key: f"{value} (restored from the checkpoint; {config[key]} in the config has no effect)"
        for key, value in optimizer.items()
        if key in config and config[key] != value
    }
    return changed | restored


def run_of_model(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The run.json of the run that saved the model in `folder`, and the config in it; None if there is none.

    A checkpoint or a merged model in the output folder of a run belongs to that run.
    """
    folder = folder.expanduser()
    places = [folder, *([folder.absolute().parent] if _INSIDE.fullmatch(folder.absolute().name) else [])]
    for place in places:
        config = (read_object(place / RUN) or {}).get("config")
        if isinstance(config, dict):
            return place / RUN, config
    return None


_OF_BASE = (
    *("base_model_config", "revision_of_model"),
    *("load_in_4bit", "load_in_8bit", "quantize_moe_experts", "bnb_config_kwargs"),
)


def keys_of_base(folder: Path) -> dict[str, Any]:
    """The keys of the run that saved an adapter which say how it loaded its base model, without those not set."""
    _, config = run_of_model(folder) or (None, {})
    return {key: config[key] for key in _OF_BASE if config.get(key) not in (None, "")}


def state_of(run: dict[str, Any]) -> str:
    """The state of a run as in run.json, "lost" if its process has ended without writing one, "unknown" if none.

    A process on another machine cannot be checked, so it is assumed to run.
    """
    state = str(run.get("state", "unknown"))
    if state == "running" and run.get("host") == socket.gethostname() and not is_alive(run.get("pid")):
        return "lost"
    return state
