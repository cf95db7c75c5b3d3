"""What each process needs to continue after a step: its running state in checkpoints, and the sums of its logs."""

from __future__ import annotations

import json
import logging
import os
import random
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import BatchSampler
from transformers import Trainer


class KeepsRunningState(Trainer):
    """Trainer that continues exactly from a checkpoint. Subclasses extend its four public methods."""

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

    def state_of_checkpoint(self) -> dict[str, Any]:
        """Return the running state of the step that a checkpoint is saved of."""
        return self.running_state()

    # Order of the rows, and the sums of logs

    def _init_training_state(self, max_steps: int, *others: Any) -> tuple[int, int]:
        with _without_comparison():
            found = super()._init_training_state(max_steps, *others)
        # transformers keeps the steps between logs, evaluations and saves of the checkpoint; those of this run apply.
        self.state.compute_steps(self.args, max_steps)
        self._total_loss = 0.0
        return found

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

    # Saving and loading

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        torch.save(self.state_of_checkpoint(), self._running_state_path(output_dir))
        if self.args.should_save:
            self.save_shared(Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            _use_schedule(self.lr_scheduler)
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


def _use_schedule(scheduler: Any) -> None:
    """Set the learning rate of the step after a checkpoint to the one of this run's schedule.

    The checkpoint restores the rate that its own schedule gave this step, which differs if the schedule has changed,
    also in length. Schedules with a state, such as ReduceLROnPlateau, have no other value.
    """
    if not isinstance(scheduler, LambdaLR):
        return
    step = scheduler.last_epoch
    rates = [rate * at_step(step) for rate, at_step in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler.load_state_dict(scheduler.state_dict() | {"_last_lr": rates})  # what is logged


@contextmanager
def _without_comparison() -> Iterator[None]:
    """Context manager without the warning about logging_steps, eval_steps, save_steps and batch size of a checkpoint.

    It does not say which of the values apply: always those of this run.
    """
    keep = lambda record: "do not match the ones in the `trainer_state.json`" not in record.getMessage()
    logger = logging.getLogger("transformers.trainer_utils")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


_ROWS, _HELD_OUT = "TrainingRows", "EvaluationRows"  # among the `stateful_callbacks` of trainer_state.json


class ComparesRows(Trainer):
    """Trainer that describes its rows in each checkpoint, and compares them when it is resumed."""

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        found = super()._init_training_state(*args)
        self._compare_rows()
        return found

    def _compare_rows(self) -> None:
        """Warn if the rows are not those of the checkpoint, and describe them in the following ones."""
        changed = self._difference(_ROWS, self.train_dataset)
        if changed is not None:
            warnings.warn(
                f"The training data differ from those of the checkpoint: {changed}. Training continues from step "
                f"{self.state.global_step} at the same position in the new data, so rows may be repeated or left out. "
                "For an exact continuation, resume with the same datasets, val_set_size and sequence_len.",
                stacklevel=2,
            )
        changed = self._difference(_HELD_OUT, self.eval_dataset)
        if changed is not None:
            warnings.warn(
                f"The evaluation data differ from those of the checkpoint: {changed}. Evaluations cannot be compared "
                "with those before, of which the best checkpoint is one.",
                stacklevel=2,
            )

    def _difference(self, name: str, rows: Any) -> str | None:
        """How `rows` differ from those that the checkpoint describes, on the main process; then describe them."""
        now, saved = describe_rows(rows), self.state.stateful_callbacks.get(name)
        if now is None:
            return None
        self.state.stateful_callbacks[name] = now
        return difference(saved, now) if saved is not None and self.is_world_process_zero() else None


_READ = 256  # rows whose contents are compared


def describe_rows(rows: Any) -> dict[str, int] | None:
    """The number of rows and a checksum of up to 256 of them, evenly spaced; None for data without a length."""
    try:
        count = len(rows)
    except TypeError:
        return None
    digest = 0
    for index in range(0, count, max(1, -(-count // _READ))):
        digest = zlib.crc32(json.dumps(rows[index], sort_keys=True, default=_plain).encode(), digest)
    return {"rows": count, "checksum": digest}


def difference(saved: dict[str, int], now: dict[str, int]) -> str | None:
    """How the data `now` differ from those described by `saved`; None if they do not."""
    if saved == now:
        return None
    if saved.get("rows") != now["rows"]:
        return f"{now['rows']:,} rows instead of {saved.get('rows'):,}"
    return f"{now['rows']:,} rows as before, with other contents or in another order"


def _plain(value: Any) -> Any:
    """Arrays and tensors as lists, other objects by their type, since their text may contain addresses."""
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__


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
