"""The checkpoints of a run: which are complete, which one to resume from, and what happens to earlier runs'."""

import json
import math
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import Trainer, TrainerCallback

from ebft.errors import ConfigError, doing, warn
from ebft.files import CHECKSUMS, STATE, checksum, json_object
from ebft.monitor.run_files import RunFiles, has_records, set_aside
from ebft.run.config.schema import RunConfig
from ebft.run.output import MARK, cards, final_files, final_step, listed, write_mark
from ebft.run.resume_compat import check_same_run
from ebft.run_files import DERIVED, PREVIOUS
from ebft.trainer.checkpoints import step_in_name

_RESUME = "resume_from_checkpoint"


class Found(NamedTuple):
    """What an earlier run left: its newest weights (the final model if `is_final`), and what can be resumed."""

    newest: Path | None = None
    resumable: Path | None = None
    is_final: bool = False

    def checkpoint(self) -> Path | None:
        """The checkpoint to resume training from. Raises ConfigError if there are only some that cannot be resumed."""
        if self.resumable is None and self.is_final:
            warn(
                f"{self.newest} contains the final model of a shorter run without checkpoints that can be resumed, so "
                "training starts from the beginning."
            )
        elif self.resumable is None and self.newest is not None:
            raise ConfigError(
                f"Training cannot be resumed from {self.newest}: it has no optimizer state, as with save_only_model: "
                "true. Resume from another checkpoint, or start a new run from its weights: in another output_dir, "
                "with lora_model_dir (for an adapter) or base_model set to this folder."
            )
        return self.resumable


def find_checkpoints(config: RunConfig) -> Found:
    """The checkpoints of an earlier run that the config asks to resume. Raises ConfigError if a named one is unusable.

    Damaged checkpoints are skipped with a warning, if no particular one is configured. A new run whose output_dir has
    checkpoints of an earlier one gives a warning, and so does a checkpoint of another folder than an output_dir in use.
    """
    output_dir = Path(config.output_dir)
    if config.resume_from_checkpoint is not None:
        named = Path(config.resume_from_checkpoint)
        if problem := damage(named):
            raise ConfigError(
                f"resume_from_checkpoint: {named} is not a complete checkpoint: {problem}. The newest complete one in "
                f"output_dir ({output_dir}) is {next(_complete(output_dir), None)}."
            )
        found = Found(named, named if has_optimizer_state(named) else None)
        is_own = output_dir.resolve() in (named.resolve(), named.resolve().parent)
        if not is_own and (has_records(output_dir) or newest_checkpoint(output_dir) is not None):
            warn(
                f"resume_from_checkpoint: {named} is not in output_dir: {output_dir}, which contains another run, "
                f"whose files would remain. Set output_dir to {named.parent} or to a new folder."
            )
    elif config.auto_resume_from_checkpoints:
        found = _newest_of(output_dir)
    else:
        found, newest = Found(), newest_checkpoint(output_dir)
        if newest is not None:
            warn(
                f"output_dir: {output_dir} has checkpoints of an earlier run, up to {newest.name}. This run does not "
                "resume from them (auto_resume_from_checkpoints: false): when its training begins, they are moved to "
                f"a new folder in {output_dir / PREVIOUS}."
            )
    for folder in {found.newest, found.resumable} - {None}:
        check_same_run(config, folder)
    return found


def refuse_checkpoint(output_dir: Path) -> None:
    """Raise ConfigError if `output_dir` is a checkpoint of a run."""
    if step_in_name(output_dir) is not None and (output_dir / STATE).is_file() and final_step(output_dir) is None:
        raise ConfigError(
            f"output_dir: {output_dir} is a checkpoint, whose files a run would replace. Set another output_dir; to "
            "continue from the checkpoint, also set resume_from_checkpoint to it."
        )


def checkpoint_folders(output_dir: Path) -> list[Path]:
    """All folders of checkpoints in `output_dir`, also damaged ones, the lowest step first."""
    found = {path: step_in_name(path) for path in output_dir.glob("checkpoint-*") if path.is_dir()}
    return sorted((path for path, step in found.items() if step is not None), key=step_in_name)


def newest_checkpoint(output_dir: Path, last_step: float = math.inf) -> Path | None:
    """The complete checkpoint with the highest step up to `last_step`, if there is one; checksums are not computed."""
    return next(_complete(output_dir, last_step, reads_all=False), None)


def checkpoint_hint(folder: Path, use: str) -> str:
    """For messages about a folder without a final model: `use`, with its newest checkpoint for `{}`; or empty."""
    newest = newest_checkpoint(folder) if folder.is_dir() else None
    if newest is None:
        return ""
    return f"It has only checkpoints of a run that did not finish; to use the newest: {use.format(newest)}"


def step_of(checkpoint: Path) -> int:
    """The optimizer step of a complete checkpoint, or of the final model in an output folder."""
    return json_object(checkpoint / STATE)["global_step"]


def how_to_resume(
    config: RunConfig, step: int, resumed: str | Path | None, command: Sequence[str] | None = None
) -> str:
    """The message for a run stopped at `step`, which `command` had started and, if any, resumed from `resumed`."""
    newest = newest_checkpoint(Path(config.output_dir), last_step=step)  # later ones are from another run
    newest = newest or (None if resumed is None else Path(resumed))
    if newest is None:
        return f"Stopped at step {step}; no checkpoint was saved."
    step = max(step, step_of(newest))  # 0 until the state of the checkpoint is loaded
    if not has_optimizer_state(newest):
        return (
            f"Stopped at step {step}. The model was saved in {newest}, but training cannot be resumed from it: it has "
            "no optimizer state (save_only_model: true)."
        )
    automatic = config.auto_resume_from_checkpoints and config.resume_from_checkpoint is None
    is_found = automatic and newest_checkpoint(Path(config.output_dir)) == newest
    if command is None:
        setting = "" if is_found else f" and resume_from_checkpoint={newest}"
        return f"Stopped at step {step}. Resume by starting the run again, with the same config{setting}"
    words = [word for word in command if word.partition("=")[0].strip() != _RESUME]
    if not is_found:
        end = words.index("--") if "--" in words else len(words)  # options for a launcher follow
        is_plain = re.fullmatch(r"[\w./-]+", str(newest))  # as YAML
        words.insert(end, f"{_RESUME}={newest if is_plain else json.dumps(str(newest))}")
    return f"Stopped at step {step}. Resume with: {shlex.join(words)}"


def _newest_of(output_dir: Path) -> Found:
    newest = resumable = None
    for folder in _complete(output_dir, warns=True):
        newest = newest or folder
        if has_optimizer_state(folder):
            resumable = folder
            break
    if final_step(output_dir) is not None and (newest is None or step_of(output_dir) > step_of(newest)):
        return Found(output_dir, resumable, is_final=True)
    return Found(newest, resumable)


def _complete(
    output_dir: Path, last_step: float = math.inf, *, warns: bool = False, reads_all: bool = True
) -> Iterator[Path]:
    """The complete checkpoints up to a step, the highest step first; with `warns`, damaged ones give a warning."""
    for folder in reversed(checkpoint_folders(output_dir)):
        if step_in_name(folder) > last_step:
            continue
        try:
            problem = damage(folder, reads_all)
        except OSError:
            if warns:  # it may be the newest one, which the run would replace
                raise
            continue
        if problem is None:
            yield folder
        elif warns:
            warn(f"{folder} is not used: {problem}. An older checkpoint is used, if there is one.")


class PreviousRun(TrainerCallback):
    """Sets the files of an earlier run aside once training begins: a run that fails before that leaves them unchanged.

    It must be the first callback of `trainer`, on all processes, so that no file of the new run is moved. `files` are
    None on other processes.
    """

    def __init__(self, config: RunConfig, trainer: Trainer, files: RunFiles | None) -> None:
        named, self._output_dir = config.resume_from_checkpoint, Path(config.output_dir)
        self._named = None if named is None else Path(named)
        self._base_model = Path(config.base_model)
        self._trainer, self._files = trainer, files

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        previous, output_dir = None, self._output_dir
        if args.should_save:
            with doing(f"moving the files of an earlier run to {output_dir / PREVIOUS}"):
                if state.global_step == 0:
                    previous = self._set_earlier_aside()
                else:
                    if self._named is not None:  # a later run would return to the checkpoints after it
                        write_mark(output_dir, None, listed(output_dir), cards(output_dir))  # of an earlier run
                        found, step = checkpoint_folders(output_dir), step_of(self._named)
                        later = [each for each in found if step_in_name(each) >= step]
                        later = [each for each in later if not each.samefile(self._named)]
                        self._move(f"Training resumes from {self._named}, so later checkpoints", later)
                    self._move("Models of the run before it was resumed", self._derived())
        if self._files is not None:
            self._files.begin(state, previous)
        self._trainer.accelerator.wait_for_everyone()

    def _set_earlier_aside(self) -> Path | None:
        """Move the checkpoints and the final model of an earlier run, which would be taken for this run's."""
        checkpoints, final = checkpoint_folders(self._output_dir), final_files(self._output_dir)
        derived = self._derived() if checkpoints or final else []
        target = self._move("The files of an earlier run", [*checkpoints, *derived], final)
        if target is not None and final:
            shutil.copy2(self._output_dir / MARK, target)
        write_mark(self._output_dir, None, {}, [])
        return target

    def _move(self, what: str, folders: list[Path], final: Sequence[Path] = ()) -> Path | None:
        """Move folders and the files of a final model to a new folder in `previous`, with one warning."""
        target = set_aside(self._output_dir, [*folders, *final])
        if target is not None:
            names = [*(folder.name for folder in folders), *(["the final model"] if final else [])]
            warn(f"{what} were moved to {target}: {', '.join(names)}")
        return target

    def _derived(self) -> list[Path]:
        """Merged and quantised models of an earlier run, without the base model: an adapter belongs to it."""
        folders = [each for name in DERIVED if ((each := self._output_dir / name) / "config.json").is_file()]
        return [each for each in folders if not each.is_symlink() and each.resolve() != self._base_model.resolve()]


_WEIGHTS = ("*model*.safetensors", "*model*.bin", "pytorch_model_fsdp*", "global_step*", "*/adapter_model.safetensors")
_OPTIMIZER = ("optimizer*", "global_step*")  # a file, FSDP's folder, DeepSpeed's folder


def damage(checkpoint: Path, reads_all: bool = True) -> str | None:
    """What is missing or damaged in a checkpoint, None if nothing is; it may have no optimizer state at all.

    Without `reads_all`, checksums are not computed, which is faster for large files. Checkpoints of other programs have
    no checksums.
    """
    if not (checkpoint / STATE).is_file():
        return f"it has no {STATE}"
    try:
        for path in sorted(checkpoint.glob("*.json")):
            json.loads(path.read_text(encoding="utf-8"))
        step = json_object(path := checkpoint / STATE).get("global_step")
        sums = json_object(path) if (path := checkpoint / CHECKSUMS).is_file() else {}
    except ValueError as error:
        return f"{path.name} is damaged ({error})"
    if step_in_name(checkpoint) not in (None, step):
        return f"it contains step {step}, unlike its name; to use it, rename it to checkpoint-{step}"
    for name, value in sums.items():
        if not (checkpoint / name).is_file():
            return f"it has no {name}"
        if reads_all and checksum(checkpoint / name) != value:
            return f"{name} is damaged (wrong checksum)"
    if not _has(checkpoint, _WEIGHTS):
        return "it has no weights (model.safetensors or adapter_model.safetensors)"
    # All of these are there, or none, as with save_only_model.
    names = {"optimizer state": _OPTIMIZER, "rng_state.pth": ("rng_state*.pth",)}
    if not any(checkpoint.glob("global_step*")):  # DeepSpeed may keep the schedule in its own folder
        names["scheduler.pt"] = ("scheduler.pt",)
    missing = [name for name, patterns in names.items() if not _has(checkpoint, patterns)]
    return f"it has no {' and no '.join(missing)}" if missing and len(missing) < len(names) else None


def has_optimizer_state(checkpoint: Path) -> bool:
    """Whether a checkpoint has optimizer state: a file or folder `optimizer*`, or DeepSpeed's `global_step*`."""
    return _has(checkpoint, _OPTIMIZER)


def _has(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(found for pattern in patterns for found in folder.glob(pattern))
