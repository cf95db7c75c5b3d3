"""transformers' Trainer with complete checkpoints, exact continuation, and safe points to stop at.

A checkpoint is written to a staging folder and renamed. Like over_transformers.py, this file uses private interfaces of
transformers, which tests/test_contracts.py checks against the installed release.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import BatchSampler
from transformers import Trainer

from ebft.durable import STAGING, clean_staging, discard, publish, write_checksums
from ebft.errors import SaveError
from ebft.row_digest import describe_rows, difference

_PENDING = "PendingEvaluation"  # among the `stateful_callbacks` of trainer_state.json
_ROWS = "TrainingRows"  # there too: the training data


class OverTrainer(Trainer):
    """Trainer whose checkpoints are complete or absent, and which continues from one exactly, also after a stop.

    `may_stop`: whether an exception may be raised now, after which `save_stopped` can save the state of the last
    completed step; not during an update, its log, and a save. `when_stoppable` is called when that becomes possible.
    The functions `into_checkpoint` are called with the folder of each checkpoint before it is complete, on one process.
    `is_interrupted` is set if training ends before its last step. Subclasses extend `running_state` and
    `restore_running_state`, `save_shared` and `load_shared`.
    """

    may_stop = True
    is_interrupted = False
    into_checkpoint: Sequence[Callable[[Path], None]] = ()
    when_stoppable: Callable[[], None] = staticmethod(lambda: None)
    _saved_step = 0  # the step of the newest checkpoint of this run, or the step that it was resumed at
    _evaluated_step = -1
    _is_saving = _is_stopping = False
    _remembered: dict[str, Any] | None = None
    _loss_to_log: tuple[Tensor, int] | None = None
    _total_loss: float | None = 0.0  # of the steps before the one resumed at, as logged; None if unknown

    def running_state(self) -> dict[str, Any]:
        """Return what this process needs to continue after this step, besides weights, optimizer and random numbers.

        Tensors and plain Python values; they must not be changed by later steps.
        """
        return {
            "loss_to_log": (self._tr_loss.clone(), self._globalstep_last_logged),
            "total_loss": self._total_loss_scalar,
            "processes": self.args.world_size,
        }

    def restore_running_state(self, state: dict[str, Any]) -> None:
        """Continue from a result of `running_state`; empty if the checkpoint has none for this process."""
        self._loss_to_log, self._total_loss = state.get("loss_to_log"), state.get("total_loss")

    def save_shared(self, folder: Path) -> None:
        """Write what is the same on all processes into a checkpoint with optimizer state; called on one process."""

    def load_shared(self, folder: Path) -> None:
        """Restore what `save_shared` has written; called on every process."""

    def save_stopped(self) -> None:
        """Save a checkpoint of the last completed step, after an exception was raised where `may_stop` allows it."""
        if self.state.global_step == self._saved_step or self._remembered is None:
            return
        set_random_state(self._remembered["random"])
        self.current_flos = self._remembered["flos"]
        if self._remembered["evaluation"]:
            self.leave_evaluation_pending()
        self._is_stopping = True
        self._save_checkpoint(self.model_wrapped, trial=None)
        self._is_stopping = False
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)

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

    def finish_evaluation(self) -> None:
        """Make the evaluation that was pending when the checkpoint was saved, if there is one."""
        if self.has_pending_evaluation:
            metrics = super()._evaluate(None, None)
            self._determine_best_metric(metrics, None)
            if self.state.best_global_step == self.state.global_step:
                folder = super()._get_output_dir(None)
                self.state.best_model_checkpoint = os.path.join(folder, f"checkpoint-{self.state.global_step}")
            del self.state.stateful_callbacks[_PENDING]

    # Order of the rows, and the sums of logs

    def _run_epoch(self, *, epoch: int, train_dataloader: Any, **others: Any) -> None:
        sampler = getattr(train_dataloader, "batch_sampler", None)
        while hasattr(sampler, "batch_sampler"):  # accelerate's wrappers, which do not all pass on the epoch
            sampler = sampler.batch_sampler
        if isinstance(sampler, BatchSampler) and hasattr(sampler.sampler, "set_epoch"):
            sampler.sampler.set_epoch(epoch)
        if self._loss_to_log is not None:  # transformers has set both to those of a new run
            loss, self._globalstep_last_logged = self._loss_to_log
            self._tr_loss += loss
            self._total_loss_scalar += self._total_loss or 0.0
            self._loss_to_log = None
        super()._run_epoch(epoch=epoch, train_dataloader=train_dataloader, **others)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with `train_loss` as the mean over all steps of the run; without it if earlier losses are unknown."""
        if "train_loss" in logs:  # of transformers: over the steps since the run was resumed
            logs = {name: value for name, value in logs.items() if name != "train_loss"}
            if self._total_loss is not None:
                logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step, 1)
        super().log(logs, start_time)

    # Phases of a step

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        found = super()._init_training_state(*args)
        self._saved_step, self._remembered, self._total_loss = self.state.global_step, None, 0.0
        self._compare_rows()
        return found

    def _compare_rows(self) -> None:
        """Warn if the training rows are not those of the checkpoint, and describe them in the following ones."""
        now, saved = describe_rows(self.train_dataset), self.state.stateful_callbacks.get(_ROWS)
        if now is None:
            return
        changed = difference(saved, now) if saved is not None else None
        if changed is not None and self.is_world_process_zero():
            warnings.warn(
                f"The training data differ from those of the checkpoint: {changed}. Training continues from step "
                f"{self.state.global_step} at the same position in the new data, so rows may be repeated or left out. "
                "For an exact continuation, resume with the same datasets, val_set_size and sequence_len.",
                stacklevel=2,
            )
        self.state.stateful_callbacks[_ROWS] = now

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._remember(evaluation=self.is_evaluation_due)
        self.may_stop = True
        self.when_stoppable()

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self._remember(evaluation=True)
        could_stop, self.may_stop = self.may_stop, True
        self.when_stoppable()
        metrics = super()._evaluate(*args, **kwargs)
        self.may_stop, self._evaluated_step = could_stop, self.state.global_step
        return metrics

    def _remember(self, evaluation: bool) -> None:
        """Keep what `save_stopped` needs; `evaluation`: whether the evaluation of this step is not finished."""
        self._remembered = {
            "random": random_state(),
            "flos": self.current_flos,
            "running": self.running_state(),
            "evaluation": evaluation,
        }

    # Saving and loading

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, STAGING) if self._is_saving else folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(super()._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        staged = folder.parent / STAGING / folder.name
        could_stop, self.may_stop = self.may_stop, False
        evaluates_later = self.is_evaluation_due and not self.has_pending_evaluation
        if evaluates_later:
            self.leave_evaluation_pending()
        try:
            if self.args.should_save:
                clean_staging(folder.parent)
            self.accelerator.wait_for_everyone()
            self._is_saving = True
            super()._save_checkpoint(model, trial)
            self._is_saving = False
            self.accelerator.wait_for_everyone()  # all processes have written their files
            if self.args.should_save:
                if self.state.best_global_step == self.state.global_step:  # the folder was not there before
                    self.state.best_model_checkpoint = str(folder)
                    self.state.save_to_json(str(staged / "trainer_state.json"))
                for write in self.into_checkpoint:
                    write(staged)
                write_checksums(staged)
                publish(staged, folder)
            self.accelerator.wait_for_everyone()
        except (OSError, RuntimeError, SafetensorError) as error:  # torch raises RuntimeError if the disk is full
            if self.args.should_save:
                clean_staging(folder.parent)
            raise SaveError.of(folder, error) from error
        finally:
            self._is_saving, self.may_stop = False, could_stop
        self._saved_step = self.state.global_step
        if evaluates_later and not self._is_stopping:
            del self.state.stateful_callbacks[_PENDING]
        if self.args.push_to_hub:
            super()._push_from_checkpoint(str(folder))
        if self.args.should_save and self.args.save_total_limit:
            rotate(folder, self.args.save_total_limit, self.state.best_model_checkpoint)
        if self.args.should_save:
            clean_staging(folder.parent)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing: the checkpoint is pushed when it is in its folder."""

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        state = self._remembered["running"] if self._is_stopping else self.running_state()
        torch.save(state, self._running_state_path(output_dir))
        if self.args.should_save:
            self.save_shared(Path(output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        target, folder = self.model if model is None else model, Path(resume_from_checkpoint)
        has_others = any(folder.glob("*/adapter_model.*"))  # then transformers loads them, and not the one beside them
        if has_others and any(folder.glob("adapter_model.*")) and isinstance(target, PeftModel):
            target.load_adapter(resume_from_checkpoint, target.active_adapters[0], is_trainable=True)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.restore_running_state(self._load_running_state(checkpoint))
            self.load_shared(Path(checkpoint))

    def _load_running_state(self, folder: str) -> dict[str, Any]:
        """The `running_state` of this process; empty, with a warning, if the checkpoint has none that fits."""
        path, processes = self._running_state_path(folder), self.args.world_size
        device = self.args.device if self.args.device.type != "cpu" else "cpu"  # torch does not map to cpu:0
        state = torch.load(path, map_location=device, weights_only=True) if os.path.isfile(path) else {}
        if state.get("processes", processes) == processes and state:
            return state
        if self.is_world_process_zero():
            reason = f"was not saved by {processes} process{'es' if processes > 1 else ''}, as this run has"
            others = any(Path(folder).glob("running_state*.pth"))
            warnings.warn(
                f"{folder} {reason if others else 'has no running_state.pth'}, so what is kept per process is lost: "
                "the sums of metrics since the last log, train_loss of the whole run, and in structured mode and GRPO "
                "the completions sampled for later updates, replayed groups and failed prompts.",
                stacklevel=2,
            )
        return {}

    def _running_state_path(self, folder: str) -> str:
        rank = f"_{self.args.process_index}" if self.args.world_size > 1 else ""
        return os.path.join(folder, f"running_state{rank}.pth")

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            self.finish_evaluation()


def random_state() -> dict[str, Any]:
    """Return the states of the random number generators of Python, NumPy and PyTorch."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: dict[str, Any]) -> None:
    """Restore a result of `random_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def rotate(newest: Path, limit: int, best: str | None) -> None:
    """Delete the oldest checkpoints beside `newest` until `limit` are left, which include `newest` and `best`."""
    kept = {newest.name} | ({Path(best).name} if best is not None else set())
    folders = [path for path in newest.parent.glob("checkpoint-*") if path.is_dir()]
    others = sorted((path for path in folders if path.name not in kept), key=lambda path: path.stat().st_mtime)
    for folder in others[: max(0, len(folders) - max(limit, len(kept)))]:
        discard(folder)
