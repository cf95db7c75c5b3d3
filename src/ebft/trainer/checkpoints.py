"""Checkpoints that are complete or absent: written to a staging folder, which is renamed."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from peft import PeftModel
from torch import distributed, nn
from transformers import logging

from ebft.errors import EBFTError, SaveError
from ebft.files import CHECKSUMS, STAGING, STATE, clean_staging, discard, publish, remove_staged, write_checksums
from ebft.models.sharding import (
    check_fits,
    has_other_names,
    is_enabled,
    is_in_parts,
    is_sharded,
    load_on_every_process,
    load_optimizer,
    load_weights,
    save_whole_optimizer,
    saves_parts,
    shard_on_cpu,
)
from ebft.trainer.pushing import PushesModel
from ebft.transformers_internals import check_tied_weights

_SCHEDULE = "scheduler.pt"


class ShardedTrainer(PushesModel):
    """Trainer whose checkpoints of FSDP2 are in parts, or have the files of a run without FSDP.

    Both can be loaded with and without FSDP.
    """

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.fsdp_plugin_args is not None:
            shard_on_cpu(self.accelerator, FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args))
            self.is_fsdp_enabled = is_enabled(self.accelerator)
            load_on_every_process()

    def saves_parts(self) -> bool:
        """Whether every process saves its part of the model and of the optimizer state."""
        return self.is_fsdp_enabled and is_sharded(self.model) and saves_parts(self.accelerator)

    def loads_here(self, folder: Path) -> bool:
        """Whether transformers cannot load the weights of a checkpoint into the model of this run."""
        if self.is_deepspeed_enabled:
            return False
        return self.is_fsdp_enabled or is_in_parts(folder) or has_other_names(self.model, folder)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model for `from_pretrained`; into a checkpoint in parts, all of its files but the weights."""
        if not self.saves_parts():
            super().save_model(output_dir, _internal_call)
            return
        folder = output_dir or self.args.output_dir
        weights = {} if self.is_saving else self.accelerator.get_state_dict(self.model)
        if self.args.should_save:
            self._save(folder, state_dict=weights)
            for path in Path(folder).glob("*model.safetensors") if self.is_saving else ():  # without tensors
                path.unlink()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_fsdp_enabled or self.saves_parts():
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save_whole_optimizer(self.optimizer, Path(output_dir), is_writer=self.args.should_save)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULE)

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint)
        if self.loads_here(folder):
            load_weights(self.model, folder)
        else:
            super()._load_best_model()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.loads_here(Path(resume_from_checkpoint)):
            load_weights(self.model, Path(resume_from_checkpoint))
        else:
            if not self.is_deepspeed_enabled:
                check_fits(self.model if model is None else model, Path(resume_from_checkpoint))
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        is_whole = checkpoint is None or not is_in_parts(Path(checkpoint))
        if is_whole and (checkpoint is None or not self.is_fsdp_enabled):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load_optimizer(self.model, self.optimizer, Path(checkpoint))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULE, weights_only=True))


_PENDING = "PendingEvaluation"  # among the `stateful_callbacks` of trainer_state.json


class FinishesEvaluations(ShardedTrainer):
    """Trainer that notes an unfinished evaluation in its state, and makes it when training is resumed there."""

    is_interrupted: bool = False  # whether training ends before its last step
    _evaluated_step = -1

    def leave_evaluation_pending(self) -> None:
        """Note in the trainer state that the evaluation of this step is still to be made."""
        self.state.stateful_callbacks[_PENDING] = {"step": self.state.global_step}

    @property
    def is_evaluation_due(self) -> bool:
        """Whether the end of this epoch, or of training, is evaluated after the step has been completed and saved."""
        ends_training = self.control.should_training_stop and not self.is_interrupted
        ends_epoch = self.state.epoch is not None and float(self.state.epoch).is_integer()
        at_end = self.args.eval_strategy == "epoch" and (ends_epoch or ends_training)
        return at_end and self._evaluated_step != self.state.global_step

    @property
    def has_pending_evaluation(self) -> bool:
        return _PENDING in self.state.stateful_callbacks

    def drop_pending_evaluation(self) -> None:
        """Remove the note from the trainer state."""
        del self.state.stateful_callbacks[_PENDING]

    def finish_evaluation(self, checkpoint: str) -> None:
        """Make the evaluation that was pending when `checkpoint` was saved, if there is one, with its random state."""
        if self.has_pending_evaluation:
            super()._load_rng_state(checkpoint)
            metrics = super()._evaluate(None, None)
            self._determine_best_metric(metrics, None)
            if self.state.best_global_step == self.state.global_step:
                folder = super()._get_output_dir(None)
                self.state.best_model_checkpoint = os.path.join(folder, f"checkpoint-{self.state.global_step}")
            self.drop_pending_evaluation()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            self.finish_evaluation(checkpoint)


class CompletesCheckpoints(FinishesEvaluations):
    """Trainer that publishes a checkpoint when all processes have written their files.

    The functions `into_checkpoint` are called with the folder of each checkpoint before it is complete, on one process,
    and `into_model` also with the folder of the final model.
    `may_stop`: whether an exception may be raised now; not during a save.
    """

    may_stop: bool = True
    into_checkpoint: Sequence[Callable[[Path], None]] = ()
    into_model: Sequence[Callable[[Path], None]] = ()
    _saved_step = 0  # the step of the newest checkpoint of this run, or the step that it was resumed at
    _is_stopping = False

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        found = super()._init_training_state(*args)
        self._saved_step = self.state.global_step
        return found

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, STAGING) if self.is_saving else folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(super()._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        staged = folder.parent / STAGING / folder.name
        could_stop, self.may_stop = self.may_stop, False
        evaluates_later = self.is_evaluation_due and not self.has_pending_evaluation
        if evaluates_later:
            self.leave_evaluation_pending()
        try:
            with self.saving(folder, staged.parent):
                if self.args.should_save:
                    clean_staging(folder.parent)
                self.accelerator.wait_for_everyone()
                self.is_saving = True
                super()._save_checkpoint(model, trial)
                self.is_saving = False
                self.accelerator.wait_for_everyone()  # all processes have written their files
                is_best = self.state.best_global_step == self.state.global_step
                if is_best:  # the folder was not there before
                    self.state.best_model_checkpoint = str(folder)
                if self.args.should_save:
                    self._complete(staged, folder, is_best)
                self.accelerator.wait_for_everyone()
        finally:
            self.is_saving, self.may_stop = False, could_stop
        self._saved_step = self.state.global_step
        if evaluates_later and not self._is_stopping:
            self.drop_pending_evaluation()
        # A push that is running reads the files of an older checkpoint: the next save deletes it.
        if self.args.should_save and self.args.save_total_limit and not self.is_pushing:
            rotate(folder, self.args.save_total_limit, self.state.best_model_checkpoint)
        if self.args.should_save:
            clean_staging(folder.parent)
        if self.args.push_to_hub:
            self.push_checkpoint(folder)

    @contextmanager
    def saving(self, folder: Path, staged: Path) -> Iterator[None]:
        """Context manager in which whatever is raised deletes `staged`, and becomes a SaveError for `folder`.

        Libraries have no common class of errors for saving: tokenizers raises Exception if the disk is full, torch
        RuntimeError, transformers ValueError for what it does not write. Errors that follow from the end of another
        process are raised as they are.
        """
        try:
            yield
        except SaveError:  # says itself what is left
            raise
        except Exception as error:
            if self.args.should_save:
                remove_staged(staged)
            if isinstance(error, EBFTError) or _is_of_another_process(error):
                raise
            newest = Path(super()._get_output_dir(None)) / f"checkpoint-{self._saved_step}"
            raise SaveError.of(folder, error, newest if newest.is_dir() else None) from error

    def rehearse_save(self, folder: Path) -> None:
        """Write what is saved of the model and the trainer to `folder`, without the weights of a whole model.

        Called on one process, before training; raises what a save would raise after hours.
        """
        is_whole = not isinstance(self.model, PeftModel)
        if is_whole:
            check_tied_weights(self.model)
        shows_progress = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # of shards, of which there are none
        try:
            self._save(str(folder), state_dict={} if is_whole else None)
        finally:
            if shows_progress:
                logging.enable_progress_bar()
        self.state.save_to_json(str(folder / STATE))
        for write in (*self.into_model, *self.into_checkpoint):
            write(folder)

    def _finalize_training(self, *args: Any, **others: Any) -> Any:
        """End training without transformers' deletion of all checkpoints but the best: the newest one is kept too."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(*args, **others)
        finally:
            self.args.save_total_limit = limit
            if self.args.push_to_hub and self.is_world_process_zero():
                self.push_remaining()
                newest = Path(super()._get_output_dir(None)) / f"checkpoint-{self._saved_step}"
                if limit and newest.is_dir():  # while a push was running, no checkpoint was deleted
                    rotate(newest, limit, self.state.best_model_checkpoint)

    def _complete(self, staged: Path, folder: Path, is_best: bool) -> None:
        """Add what is written last to a staged checkpoint, and move it to its folder; called on one process."""
        if is_best:
            self.state.save_to_json(str(staged / STATE))
        for write in (*self.into_model, *self.into_checkpoint):
            write(staged)
        write_checksums(staged)
        publish(staged, folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        target, folder = self.model if model is None else model, Path(resume_from_checkpoint)
        if self.loads_here(folder):
            return
        has_others = any(folder.glob("*/adapter_model.*"))  # then transformers loads them, and not the one beside them
        if has_others and any(folder.glob("adapter_model.*")) and isinstance(target, PeftModel):
            target.load_adapter(resume_from_checkpoint, target.active_adapters[0], is_trainable=True)


def _is_of_another_process(error: Exception) -> bool:
    """Whether communication has failed because another process has ended."""
    words = ("gloo", "NCCL", "by peer", "process group", "Broken pipe")
    is_distributed = distributed.is_available() and distributed.is_initialized()
    return is_distributed and isinstance(error, RuntimeError) and any(word in str(error) for word in words)


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
