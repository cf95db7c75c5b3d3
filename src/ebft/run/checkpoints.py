"""Finding the checkpoint to resume a run from."""

import json
import math
import warnings
from pathlib import Path

from ebft.config.schema import RunConfig
from ebft.errors import ConfigError
from ebft.run.same_run import check_same_run

# Trainer writes this file last, so a checkpoint without it is incomplete.
_LAST_FILE = "trainer_state.json"


def find_checkpoint(config: RunConfig) -> str | None:
    """The checkpoint folder to resume from, or None. Raises ConfigError if the configured one is unusable.

    A new run whose output_dir has checkpoints of an earlier one gives a warning.
    """
    checkpoint = None
    if config.resume_from_checkpoint is not None:
        checkpoint = _named(Path(config.resume_from_checkpoint), Path(config.output_dir))
    elif config.auto_resume_from_checkpoints:
        checkpoint = newest_checkpoint(Path(config.output_dir))
    if checkpoint is None:
        _warn_of_earlier_run(Path(config.output_dir))
        return None
    if not has_optimizer_state(checkpoint):
        raise ConfigError(
            f"Training cannot be resumed from {checkpoint}: it has no optimizer state, as with save_only_model: true. "
            "Resume from another checkpoint, or start a new run from its weights: in another output_dir, with "
            "lora_model_dir (for an adapter) or base_model set to this folder."
        )
    check_same_run(config, checkpoint)
    return str(checkpoint)


def newest_checkpoint(output_dir: Path, last_step: float = math.inf) -> Path | None:
    """The complete checkpoint with the highest step up to `last_step` in `output_dir`, if there is one."""
    found = [folder for folder in output_dir.glob("checkpoint-*") if (folder / _LAST_FILE).is_file()]
    return max((folder for folder in found if _step(folder) <= last_step), key=_step, default=None)


def has_optimizer_state(checkpoint: Path) -> bool:
    """Whether a checkpoint has optimizer state: a file or folder `optimizer*`, or DeepSpeed's `global_step*`."""
    return any(found for pattern in ("optimizer*", "global_step*") for found in checkpoint.glob(pattern))


def step_of(checkpoint: str) -> int:
    """The optimizer step of a complete checkpoint. Raises ConfigError if its state cannot be read."""
    path = Path(checkpoint) / _LAST_FILE
    try:
        return json.loads(path.read_text(encoding="utf-8"))["global_step"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}). Resume from another checkpoint.") from error


def _warn_of_earlier_run(output_dir: Path) -> None:
    newest = newest_checkpoint(output_dir)
    if newest is not None:
        warnings.warn(
            f"output_dir: {output_dir} has checkpoints of an earlier run, up to {newest.name}. This run does not "
            "resume from them, but auto_resume_from_checkpoints would later continue from the highest step of both "
            "runs. Set another output_dir, or delete them.",
            stacklevel=3,
        )


def _step(folder: Path) -> int:
    step = folder.name.rpartition("-")[2]
    return int(step) if step.isdigit() else -1


def _named(folder: Path, output_dir: Path) -> Path:
    if (folder / _LAST_FILE).is_file():
        return folder
    newest = newest_checkpoint(output_dir)
    problem = f"has no {_LAST_FILE}, so it is not a complete checkpoint" if folder.is_dir() else "is not a folder"
    hint = (
        f"The one with the highest step in output_dir is {newest}."
        if newest
        else f"output_dir ({output_dir}) has no checkpoint."
    )
    raise ConfigError(f"resume_from_checkpoint: {folder} {problem}. {hint}")
