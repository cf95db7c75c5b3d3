"""The checkpoints of a run: which are complete, which one to resume from, and what happens to earlier runs'; whether
one fits on the disk."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import Trainer, TrainerCallback

from ebft.errors import ConfigError, EBFTError, SaveError, doing, save_problem, warn
from ebft.files import CHECKSUMS, STAGING, STATE, checksum, json_object, remove_staged
from ebft.machine import free_disk, gib
from ebft.monitor.run_files import RunFiles, has_records, set_aside
from ebft.run.config.schema import RunConfig
from ebft.run.output import MARK, cards, final_files, final_step, listed, write_mark
from ebft.run.reporting import write_model_card
from ebft.run.resume_compat import check_same_run
from ebft.run.trainer import planned_steps, steps_of_epoch, this_machine
from ebft.run_files import DERIVED, PREVIOUS
from ebft.trainer import OverTrainer
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
                f"Training cannot be resumed from {self.newest}: it has no optimizer state (save_only_model: true). In "
                "another output_dir, a new run can start from its weights: set lora_model_dir or base_model to it."
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
                f"resume_from_checkpoint: {named} is not in output_dir: {output_dir}, whose files of another run would "
                f"remain. Set output_dir to {named.parent} or to a new folder."
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


# Optimizer values per trained weight; AdamW and similar ones otherwise. In bytes for 8-bit optimizers.
_STATES = {"sgd": 0, "adafactor": 0, "adagrad": 1, "lion": 1, "rmsprop": 1}


def rehearse(config: RunConfig, trainer: OverTrainer) -> None:
    """Save all but the weights of a whole model and the optimizer state, and delete it. Raises SaveError."""
    if not trainer.args.should_save or trainer.is_deepspeed_enabled:  # which has emptied the weights
        return
    output_dir = Path(config.output_dir)
    staged = output_dir / STAGING / "rehearsal"
    try:
        remove_staged(staged)
        trainer.rehearse_save(staged)
        write_model_card(config, {}, staged)
    except EBFTError:
        raise
    except Exception as error:  # of any library that writes a file
        raise SaveError(
            f"The model could not be saved in {output_dir}, so training is not started: {save_problem(staged, error)}"
        ) from error
    finally:
        remove_staged(staged)


def check_space(config: RunConfig, trainer: OverTrainer, rows: int, is_resumed: bool) -> None:
    """Raise SaveError if the weights alone need more than the free space, and warn if checkpoints are estimated to."""
    if not trainer.args.should_save:
        return
    trained = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    saved = trained if config.adapter is not None else list(trainer.model.parameters())
    weights = sum(weight.numel() * weight.element_size() for weight in saved)
    states = sum(weight.numel() * optimizer_bytes(config.optimizer, weight.element_size()) for weight in trained)
    count = checkpoints_kept(config, rows)
    count = min(count, 1) if is_resumed else count  # others may be there already
    problem, _ = disk_need(config, weights, weights + (0 if config.save_only_model else states), count)
    if problem is None:
        return
    if weights > free_disk(config.output_dir)[0]:
        raise SaveError(f"The model could not be saved, so training is not started: it needs {problem}")
    warn(f"output_dir: the disk may become full, which ends the run. It needs {problem}")


def disk_need(config: RunConfig, weights: int, checkpoint: int, count: int) -> tuple[str | None, str]:
    """What a run needs on the disk for `count` checkpoints and the model, in bytes: the problem, if any, and facts."""
    total = checkpoint * count + weights
    free, existing = free_disk(config.output_dir)
    kept = f"{count} checkpoint{'' if count == 1 else 's'}"
    text = f"about {gib(total)} for {kept} and the model; {gib(free)} are free in {existing}"
    remedy = "Set save_total_limit, save_only_model: true, a larger save_steps, or an output_dir on another disk."
    return f"{text}. {remedy}" if total > free else None, text


def checkpoints_kept(config: RunConfig, rows: int) -> int:
    """Number of checkpoints that are on the disk at the same time."""
    machine = this_machine()
    steps = planned_steps(config, machine, rows)
    per_epoch = steps_of_epoch(config, machine, rows)
    every = config.save_steps
    if config.saves_per_epoch is not None:
        every = max(1, per_epoch // config.saves_per_epoch)
    if config.save_strategy == "no":
        return 0
    if every is None or config.save_strategy == "epoch":
        every = per_epoch
    elif every < 1:  # a fraction of the steps
        every = max(1, round(every * steps))
    count = max(1, -(-steps // int(every)))
    # The oldest one is deleted after the newest one is saved.
    return count if config.save_total_limit is None else min(count, config.save_total_limit + 1)


def optimizer_bytes(name: str, trained_bytes: int) -> int:
    """Bytes of optimizer state per trained weight."""
    if "4bit" in name:
        return 1
    if "8bit" in name:
        return 1 if "lion" in name or "rmsprop" in name else 2
    known = next((values for key, values in _STATES.items() if name.startswith(key)), 2)
    return known * trained_bytes
