"""The state of a run, from its run.json."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from ebft.dashboard.files import METRICS, ROLLOUTS, RUN, START, read_object, rollout_files
from ebft.errors import RunError


def check_run(folder: Path) -> None:
    """Raise RunError if `folder` is not the output folder of a run."""
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder. Give the output_dir of a run.")
    if not (folder / RUN).is_file() and not (folder / METRICS).is_file() and not rollout_files(folder):
        raise RunError(
            f"{folder} has neither {RUN} nor {METRICS}, which `ebft train` writes to output_dir. Give the output_dir "
            "of a run."
        )


def check_rollouts(folder: Path) -> None:
    """Raise RunError if the run in `folder` has no log of rollouts, with the key that enables it."""
    check_run(folder)
    if rollout_files(folder):
        return
    run = read_run(folder)
    config, state = run.get("config"), state_of(run)
    config = config if isinstance(config, dict) else {}
    if config and config.get("rl") is None:
        raise RunError(f"{folder} has no {ROLLOUTS}: supervised fine-tuning samples no rollouts.")
    keys = "ebft.log_completions (strided mode) or trl.log_completions (structured mode, GRPO)"
    if config:
        sections = {name: value for name, value in config.items() if isinstance(value, dict)}
        strided = config.get("rl") == "ebft" and sections.get("ebft", {}).get("mode") == "strided"
        key = "ebft.log_completions" if strided else "trl.log_completions"
        section, _, name = key.partition(".")
        keys = key
        if sections.get(section, {}).get(name):
            raise RunError(f"{folder} has no {ROLLOUTS} yet: {key} is set, but no step is complete (run: {state}).")
    raise RunError(f"{folder} has no {ROLLOUTS}. Set {keys}: true in the config of the run to write it.")


def read_run(folder: Path) -> dict[str, Any]:
    """The content of run.json, or of start.json while a run starts; empty if it is missing or cannot be read."""
    start = read_object(folder / START) or {}
    return start if state_of(start) == "running" else read_object(folder / RUN) or {}


def state_of(run: dict[str, Any]) -> str:
    """The state of a run as in run.json, "lost" if its process has ended without writing one, "unknown" if none.

    A process on another machine cannot be checked, so it is assumed to run.
    """
    state = str(run.get("state", "unknown"))
    if state == "running" and run.get("host") == socket.gethostname() and not is_alive(run.get("pid")):
        return "lost"
    return state


def is_alive(pid: Any) -> bool:
    """Whether a process with this id exists on this machine, apart from one that has ended and waits for its parent."""
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return True
