"""The state of a run, from its run.json."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any

from ebft.errors import RunError
from ebft.monitor.run_files import METRICS, ROLLOUTS, RUN, START, read_object, rollout_files

_INSIDE = re.compile(r"checkpoint-\d+|merged|quantized")  # folders of models in an output folder


def check_run(folder: Path) -> None:
    """Raise RunError if `folder` is not the output folder of a run."""
    if not folder.is_dir():
        problem = "is a file, not a folder" if folder.exists() else "does not exist"
        raise RunError(f"{folder} {problem}. Give the output_dir of a run.")
    if not (folder / RUN).is_file() and not (folder / METRICS).is_file() and not rollout_files(folder):
        inside = sorted(path.parent.name for path in folder.glob(f"*/{RUN}"))
        meant = f" Runs in it: {', '.join(inside[:5])}{', ...' * (len(inside) > 5)}." if inside else ""
        raise RunError(
            f"{folder} has none of {RUN}, {METRICS} and {ROLLOUTS}, which `ebft train` writes to output_dir. Give the "
            f"output_dir of a run.{meant}"
        )


def check_rollouts(folder: Path) -> None:
    """Raise RunError if the run in `folder` has no log of rollouts, with the key that enables it."""
    check_run(folder)
    if rollout_files(folder):
        return
    run = read_run(folder)
    config, state = run.get("config"), state_of(run)
    config = config if isinstance(config, dict) else {}
    if config and not samples_rollouts(config):
        classifier = any(config.get(flag) for flag in ("reward_model", "process_reward_model"))
        plain = config.get("rl") is None and not classifier
        method = "supervised fine-tuning" if plain else run.get("method") or "its method"
        raise RunError(f"{folder} has no {ROLLOUTS}: {method} samples no rollouts.")
    is_logged, key = logs_rollouts(config)
    if is_logged:
        raise RunError(f"{folder} has no {ROLLOUTS} yet: {key} is set, but no step is complete (run: {state}).")
    raise RunError(f"{folder} has no {ROLLOUTS}. Set {key}: true in the config of the run to write it.")


def samples_rollouts(config: dict[str, Any]) -> bool:
    """Whether the method of a run with this config samples rollouts; SFT, preferences and reward models do not."""
    return config.get("rl") in ("ebft", "grpo", "gdpo")


def logs_rollouts(config: dict[str, Any]) -> tuple[bool, str]:
    """Whether a run with this config writes its rollouts, and the key that enables it; both keys if it is unknown."""
    if not config:
        return False, "ebft.log_completions (strided mode) or trl.log_completions (structured mode, GRPO)"
    sections = {name: value for name, value in config.items() if isinstance(value, dict)}
    strided = config.get("rl") == "ebft" and sections.get("ebft", {}).get("mode") == "strided"
    section, name = "ebft" if strided else "trl", "log_completions"
    return bool(sections.get(section, {}).get(name)), f"{section}.{name}"


def read_run(folder: Path) -> dict[str, Any]:
    """The content of run.json, or of start.json while a run starts; empty if it is missing or cannot be read."""
    start = read_object(folder / START) or {}
    return start if state_of(start) == "running" else read_object(folder / RUN) or {}


def settings_in_effect(run: dict[str, Any]) -> dict[str, Any]:
    """The options of a run that differ from their defaults, and those of which a checkpoint restored another value.

    The latter have a note with the value of the config, which has no effect. `run`: the content of run.json.
    """
    changed, config, optimizer = (
        value if isinstance(value, dict) else {} for value in map(run.get, ("changed", "config", "optimizer"))
    )
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
