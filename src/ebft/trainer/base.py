"""OverTrainer: transformers' Trainer with complete checkpoints, exact continuation, and safe points to stop at."""

from __future__ import annotations

import logging
import math
import os
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, Sampler
from transformers import Trainer, TrainerControl
from transformers import logging as transformers_logging

from ebft.errors import NonFiniteLossError, warn
from ebft.files import STAGING, STATE, clean_staging, json_object, publish, write_checksums
from ebft.models import sharding
from ebft.models.load import warn_of_lost_steps
from ebft.monitor.budget import COUNTED, Budget, KeepBudget
from ebft.monitor.metrics import maxima_over_ranks, read_numbers, sums_over_ranks
from ebft.monitor.run_files import PENDING_EVALUATION
from ebft.trainer import checkpoints
from ebft.trainer.pushing import Pushing
from ebft.transformers_internals import check_tied_weights, seeded_groups

_HINT = (
    "The update was not applied, and saved checkpoints are valid. Check these documents and resume training, or "
    "start a new run from the weights of a checkpoint with a smaller learning_rate (lora_model_dir or base_model): "
    "resuming would keep the learning rate."
)
_SCHEDULE = "scheduler.pt"


class OverTrainer(Trainer):
    """Trainer whose checkpoints are complete or absent, and which continues from one exactly, also after a stop.

    Data without a length are continued exactly until they have ended once; after that, there is a warning.

    A checkpoint is published when all processes have written their files. With FSDP2 it is in parts, or has the files
    of a run without FSDP; both can be loaded with and without FSDP. An evaluation that was not finished is noted in the
    state, and made when training is resumed. Non-finite losses and gradients raise NonFiniteLossError. Pushes contain
    the files of the model only, and a new repository is private unless asked otherwise.

    Subclasses extend `running_state` and `restore_running_state`, `save_shared` and `load_shared`, and add documents
    and generated tokens to `budget`, the totals of the run, which are logged with the loss (FLOPs not for compiled
    models).
    """

    control: TrainerControl
    current_flos: float
    arrange: Callable[[Optimizer], Optimizer] | None = None  # what becomes of a new optimizer
    into_checkpoint: Sequence[Callable[[Path], None]] = ()  # called on one process with the folder of each checkpoint
    into_model: Sequence[Callable[[Path], None]] = ()  # also with the folder of the final model
    card: Callable[[], str] | None = None  # the model card that is pushed
    may_stop: bool = True  # whether `save_stopped` could save the last completed step after an exception
    when_stoppable: Callable[[], None] = staticmethod(lambda: None)  # called when that becomes possible
    is_interrupted: bool = False  # whether training ends before its last step
    is_saving: bool = False  # whether a checkpoint is being saved
    _is_stopping = False  # whether it is the one of `save_stopped`
    _is_ending = False  # whether the last step and its evaluation are complete
    _has_best = False  # whether the best model is loaded
    _saved_step = 0  # the step of the newest checkpoint of this run, or the step that it was resumed at
    _evaluated_step = -1
    _completed: dict[str, Any] | None = None  # what `save_stopped` needs of the last completed step
    _loss_to_log: tuple[Tensor, int] | None = None
    _stream_ended = False  # whether training data without a length have been read to their end
    _step_began: float | None = None  # when its first micro-batch did
    _total_loss: float | None = 0.0  # of the steps before the one resumed at, as logged; None if unknown

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        model: Any = kwargs.get("model", args[0] if args else None)
        weights = model.parameters() if isinstance(model, nn.Module) else ()
        before = [(weight, weight.data) for weight in weights if weight.requires_grad]
        super().__init__(*args, **kwargs)
        for weight, own in before:  # TRL rounds adapters of quantised models to bfloat16
            weight.data = weight.data if weight.dtype == own.dtype else own.to(weight.device)
        sharding.keep_whole_eight_bits(self.accelerator, self.model)
        self.budget: Budget = Budget()
        self._unchecked: list[tuple[Tensor, dict[str, Any]]] = []  # the losses of the step, and their batches
        self.add_callback(KeepBudget(self))

    @cached_property
    def pushing(self) -> Pushing:
        return Pushing(self)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # Batches are in pinned memory (`dataloader_pin_memory`), so that copies need not wait for the steps before.
        self.accelerator.dataloader_config.non_blocking = True
        if self.args.fsdp_plugin_args is not None:
            self.is_fsdp_enabled = sharding.set_up(self.accelerator, self.args.fsdp_plugin_args)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new and self.arrange is not None:
            self.optimizer = optimizer = self.arrange(optimizer)
        return optimizer

    # A step: the update, its log, and whether training may be stopped

    def computing_models(self) -> list[nn.Module]:
        """Return the models whose FLOPs are counted."""
        return [self.model]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._unchecked, self._step_began = [], None
        self.args.logging_nan_inf_filter = False  # which waits twice for every loss; those are checked below
        warn_of_lost_steps(self.model, self.args.learning_rate)
        with self.budget.meter.watching([] if self.args.torch_compile else self.computing_models()):
            found = super().train(*args, **kwargs)
        self.use_result()
        return found

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """transformers' estimate, only for compiled models: it knows no rollouts, and walks through all parameters."""
        return super().floating_point_ops(inputs) if self.args.torch_compile else 0

    def store_flos(self) -> None:
        """`total_flos` is `budget/flops`, which does not count compiled models."""
        super().store_flos()
        if not self.args.torch_compile:
            self.state.total_flos = float(self.budget.totals["flops"])

    def use_result(self) -> None:
        """Give the model the weights that are the result: schedule-free optimizers train at others."""
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        self.begin_seconds()
        with self.budget.meter.counting():
            loss = super().training_step(model, inputs, num_items_in_batch)
        self._unchecked.append((loss, inputs))
        if not self.is_in_train:  # then no update follows, before which it is checked
            self._check_losses()
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        norm = self._check_losses(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        # With fp16, the gradient scaler skips such updates and reduces its scale.
        if norm is not None and not self.args.fp16 and not math.isfinite(norm):
            step = self.state.global_step + 1
            raise NonFiniteLossError(f"The gradient norm is {norm} at step {step}. " + _HINT)
        self._end_seconds()
        return norm

    def _check_losses(self, norm: Tensor | float | None = None) -> float | None:
        """Check the losses of the step before its update, and return the gradient norm, in one wait for the device."""
        unchecked, self._unchecked = self._unchecked, []
        *losses, read = read_numbers([*(loss for loss, _ in unchecked), 0.0 if norm is None else norm])
        for loss, (_, inputs) in zip(losses, unchecked):
            if not math.isfinite(loss):
                step = self.state.global_step + 1
                raise NonFiniteLossError(
                    f"The loss is {loss} at step {step}, in a batch of {_describe(inputs)}. " + _HINT
                )
        return None if norm is None else read

    def _end_seconds(self) -> None:
        if self._step_began is not None:
            self.add_seconds(time.perf_counter() - self._step_began)
            self._step_began = None

    def begin_seconds(self) -> None:
        """Begin to time the optimizer step, unless it has begun."""
        self._step_began = time.perf_counter() if self._step_began is None else self._step_began

    def add_seconds(self, seconds: float) -> None:
        """Called before each update with the time that its gradients took, from the first micro-batch on."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with `train_loss` as the mean over all steps of the run; without it if earlier losses are unknown."""
        if "loss" in logs or "train_loss" in logs:  # the latter is logged once, at the end of training
            counted = [name for name in COUNTED if name != "flops" or not self.args.torch_compile]
            logs = {**logs, **{f"budget/{name}": self.budget.totals[name] for name in counted}}
        if "loss" in logs and torch.cuda.is_available():
            peaks = [torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30]
            logs |= zip(("memory/max_alloc", "memory/max_reserved"), maxima_over_ranks(peaks, self.accelerator))
        if "train_loss" in logs:  # of transformers: over the steps since the run was resumed
            logs = {name: value for name, value in logs.items() if name != "train_loss"}
            if self._total_loss is not None:
                logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step, 1)
        super().log(logs, start_time)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Report missing weights, except those that the checkpoint has under the name of a weight they are tied to."""
        names: dict[nn.Parameter, set[str]] = defaultdict(set)
        for name, weight in self.model.named_parameters(remove_duplicate=False):
            names[weight].add(name)
        missing = set(load_result.missing_keys)
        missing -= {name for tied in names.values() if not tied <= missing for name in tied}
        load_result.missing_keys[:] = [name for name in load_result.missing_keys if name in missing]
        super()._issue_warnings_after_load(load_result)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._check_losses()  # of an epoch that ends without an update
        self._end_seconds()
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._remember(evaluation=self.is_evaluation_due)
        self.may_stop = True
        self.when_stoppable()

    def _remember(self, evaluation: bool) -> None:
        """Keep what `save_stopped` needs; `evaluation`: whether the evaluation of this step is not finished."""
        self._completed = {
            "random": checkpoints.random_state(),
            "flos": self.current_flos,
            "tokens": self.state.num_input_tokens_seen,  # TRL counts them when it samples, before the step is complete
            "running": self.running_state(),
            "evaluation": evaluation,
        }

    def save_stopped(self) -> None:
        """Save a checkpoint of the last completed step, after an exception was raised where `may_stop` allows it."""
        completed = self._completed
        if self.state.global_step == self._saved_step or completed is None:
            return
        checkpoints.set_random_state(completed["random"])
        self.current_flos, self.state.num_input_tokens_seen = completed["flos"], completed["tokens"]
        if completed["evaluation"]:
            self.leave_evaluation_pending()
        self._is_stopping = True
        self._save_checkpoint(self.model_wrapped, trial=None)
        self._is_stopping = False
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    # Evaluations; the resumed run makes an unfinished one

    def _evaluate(self, *args: Any, skip_scheduler: bool = False, **kwargs: Any) -> dict[str, float]:
        """Evaluate at a point where training may be stopped; `skip_scheduler`: for eval_on_start."""
        if skip_scheduler and self.state.global_step > 0:  # resumed: the run has made it before its first step
            return {}
        if self.state.global_step > 0:  # there is no completed step to save before
            self._remember(evaluation=True)
        could_stop, self.may_stop = self.may_stop, True
        self.when_stoppable()
        with checkpoints.same_random_state():
            metrics = super()._evaluate(*args, skip_scheduler=skip_scheduler, **kwargs)
        self.may_stop, self._evaluated_step = could_stop, self.state.global_step
        return metrics

    @property
    def is_evaluation_due(self) -> bool:
        """Whether the end of this epoch, or of training, is evaluated after the step has been completed and saved."""
        ends_training = self.control.should_training_stop and not self.is_interrupted
        ends_epoch = self.state.epoch is not None and float(self.state.epoch).is_integer()
        at_end = self.args.eval_strategy == "epoch" and (ends_epoch or ends_training)
        return at_end and self._evaluated_step != self.state.global_step

    @property
    def has_pending_evaluation(self) -> bool:
        return PENDING_EVALUATION in self.state.stateful_callbacks

    def leave_evaluation_pending(self) -> None:
        """Note in the trainer state that the evaluation of this step is still to be made."""
        self.state.stateful_callbacks[PENDING_EVALUATION] = {"step": self.state.global_step}

    def finish_evaluation(self, checkpoint: str) -> None:
        """Make the evaluation that was pending when `checkpoint` was saved, if there is one, with its random state."""
        if self.has_pending_evaluation:
            super()._load_rng_state(checkpoint)
            with checkpoints.same_random_state():
                metrics = super()._evaluate(None, None)
            self._determine_best_metric(metrics, None)
            if self.state.best_global_step == self.state.global_step:
                folder = super()._get_output_dir(None)
                self.state.best_model_checkpoint = os.path.join(folder, f"checkpoint-{self.state.global_step}")
            del self.state.stateful_callbacks[PENDING_EVALUATION]

    # Saving: what is the same on all processes, and the running state of each

    def running_state(self) -> dict[str, Any]:
        """What else this process needs to continue; later steps must not change it."""
        return {
            "loss_to_log": (self._tr_loss.clone(), self._globalstep_last_logged),
            "total_loss": self._total_loss_scalar,
            "processes": self.args.world_size,
            "stream_ended": self._stream_ended,
        }

    def save_shared(self, folder: Path) -> None:
        """Write what is the same on all processes into a checkpoint with optimizer state; called on one process."""

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        state = self._completed["running"] if self._is_stopping else self.running_state()
        torch.save(state, checkpoints.running_state_path(output_dir, self.args))
        if self.args.should_save:
            self.save_shared(Path(output_dir))

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, STAGING) if self.is_saving else folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(super()._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        staged = folder.parent / STAGING / folder.name
        could_stop, self.may_stop = self.may_stop, False
        self.use_result()
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
                    if is_best:
                        self.state.save_to_json(str(staged / STATE))
                    for write in (*self.into_model, *self.into_checkpoint):
                        write(staged)
                    write_checksums(staged)
                    publish(staged, folder)
                self.accelerator.wait_for_everyone()
        finally:
            self.is_saving, self.may_stop = False, could_stop
        self._saved_step = self.state.global_step
        if evaluates_later and not self._is_stopping:
            del self.state.stateful_callbacks[PENDING_EVALUATION]
        # A push that is running reads the files of an older checkpoint: the next save deletes it.
        if self.args.should_save and self.args.save_total_limit and not self.pushing.needs_files:
            checkpoints.rotate(folder, self.args.save_total_limit, self.state.best_model_checkpoint)
        if self.args.should_save:
            clean_staging(folder.parent)
        if self.args.push_to_hub:
            self.pushing.push_checkpoint(folder)

    @property
    def _newest_checkpoint(self) -> Path:
        return Path(super()._get_output_dir(None)) / f"checkpoint-{self._saved_step}"

    def saving(self, folder: Path, staged: Path) -> AbstractContextManager[None]:
        """Context manager in which whatever is raised deletes `staged`, and becomes a SaveError for `folder`."""
        return checkpoints.saving(folder, staged, self._newest_checkpoint, is_writer=self.args.should_save)

    def rehearse_save(self, folder: Path) -> None:
        """Write what is saved to `folder`, without a whole model's weights; called on one process, before training."""
        is_whole = not isinstance(self.model, PeftModel)
        if is_whole:
            check_tied_weights(self.model)
        shows_progress = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()  # there are no shards
        self._save(str(folder), state_dict={} if is_whole else None)
        if shows_progress:
            transformers_logging.enable_progress_bar()
        self.state.save_to_json(str(folder / STATE))
        for write in (*self.into_model, *self.into_checkpoint):
            write(folder)

    def _finalize_training(self, *args: Any, **others: Any) -> Any:
        """End training without transformers' deletion of all checkpoints but the best: the newest one is kept too."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        self._is_ending = not self.is_interrupted
        try:
            return super()._finalize_training(*args, **others)
        finally:
            self.args.save_total_limit = limit
            if self.args.push_to_hub and self.is_world_process_zero():
                self.pushing.push_remaining()
                newest = self._newest_checkpoint
                if limit and newest.is_dir():  # while a push was running, no checkpoint was deleted
                    checkpoints.rotate(newest, limit, self.state.best_model_checkpoint)

    # Weights and optimizer, which FSDP2 may have sharded

    def saves_parts(self) -> bool:
        """Whether every process saves its part of the model and of the optimizer state."""
        return self.is_fsdp_enabled and sharding.is_sharded(self.model) and sharding.saves_parts(self.accelerator)

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
        sharding.save_whole_optimizer(self.optimizer, Path(output_dir), is_writer=self.args.should_save)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULE)

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint)
        if self.is_deepspeed_enabled or not folder.is_dir():  # on a machine without the disk that has it, a warning
            super()._load_best_model()
        else:
            sharding.load_checkpoint_weights(self.model, folder)
        self._has_best = True

    def load_result(self) -> bool:
        """After an exception in `train`: whether the result is there, in one process; it is then loaded."""
        is_last = 0 < self.state.max_steps <= self.state.global_step and self.args.world_size == 1
        if not (is_last or self._is_ending):
            return False
        self.use_result()
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint and not self._has_best:
            self._load_best_model()
        return True

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.is_deepspeed_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            sharding.load_checkpoint_weights(self.model, Path(resume_from_checkpoint))

    # Resuming, in the order in which transformers calls these

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        is_whole = checkpoint is None or not sharding.is_in_parts(Path(checkpoint))
        if is_whole and (checkpoint is None or not self.is_fsdp_enabled):
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            sharding.load_optimizer(self.model, self.optimizer, Path(checkpoint))
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULE, weights_only=True))
        if checkpoint is not None:
            checkpoints.use_schedule(self.lr_scheduler, self.state.global_step, self.is_world_process_zero())
            self.restore_running_state(checkpoints.read_running_state(checkpoint, self.args))
            self.load_shared(Path(checkpoint))

    def restore_running_state(self, state: dict[str, Any]) -> None:
        """Continue from a result of `running_state`; empty if the checkpoint has none for this process."""
        self._loss_to_log, self._total_loss = state.get("loss_to_log"), state.get("total_loss")
        self._stream_ended = state.get("stream_ended", False)
        if self._stream_ended:
            warn("train_dataset is a stream that had ended before this checkpoint: training continues from its start.")

    def load_shared(self, folder: Path) -> None:
        """Restore what `save_shared` has written; called on every process."""

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, epochs: int, resume_from_checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        wrong = ("do not match the ones in the `trainer_state.json`", "recorded in the resumed state does not exist")
        keep = lambda record: not any(text in record.getMessage() for text in wrong)
        with ExitStack() as stack:  # this run's settings apply, and the best checkpoint is looked for below
            for logger in map(logging.getLogger, ("transformers.trainer", "transformers.trainer_utils")):
                logger.addFilter(keep)
                stack.callback(logger.removeFilter, keep)
            found = super()._init_training_state(max_steps, steps_per_epoch, epochs, resume_from_checkpoint, trial)
        if resume_from_checkpoint is not None:
            resumed = Path(resume_from_checkpoint)
            self.find_best_checkpoint(resumed / STATE, resumed.parent)
        checkpoints.compare_rows(self.state, self.train_dataset, self.eval_dataset, warns=self.is_world_process_zero())
        # transformers keeps the steps between logs, evaluations and saves of the checkpoint; this run's apply.
        self.state.compute_steps(self.args, max_steps)
        self._saved_step, self._total_loss, self._completed = self.state.global_step, 0.0, None
        return found

    def find_best_checkpoint(self, state: Path, folder: Path) -> None:
        """Note where in `folder` the best checkpoint of a run is that continues from the file `state`.

        The path in the file is as output_dir was written, which may be relative, and the folder may have been moved.
        """
        recorded = json_object(state).get("best_model_checkpoint")
        found = None if recorded is None else folder / Path(recorded).name
        self.state.best_model_checkpoint = str(found) if found is not None and found.is_dir() else None
        if found is not None and self.state.best_model_checkpoint is None and self.args.load_best_model_at_end:
            warn(
                f"load_best_model_at_end: {found.name}, the best checkpoint so far, is not in {folder}, so the best "
                "model of this run is only looked for among the steps that follow."
            )

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Sampler | None:
        found = super()._get_train_sampler(*args, **kwargs)
        return seeded_groups(found, self.args.seed if self.args.data_seed is None else self.args.data_seed)

    def _run_epoch(self, *, epoch: int, train_dataloader: Any, **others: Any) -> None:
        sampler = getattr(train_dataloader, "batch_sampler", None)
        while hasattr(sampler, "batch_sampler"):  # accelerate's wrappers, which do not all pass on the epoch
            sampler = sampler.batch_sampler
        if isinstance(sampler, BatchSampler) and hasattr(sampler.sampler, "set_epoch"):
            sampler.sampler.set_epoch(epoch)
        if self._loss_to_log is not None:  # transformers has set both as for a new run
            loss, self._globalstep_last_logged = self._loss_to_log
            self._tr_loss += loss
            self._total_loss_scalar += self._total_loss or 0.0
            self._loss_to_log = None
        if others["resume_from_checkpoint"] is not None:
            self.finish_evaluation(others["resume_from_checkpoint"])
            if self.control.should_training_stop:  # because of this evaluation
                return
        super()._run_epoch(epoch=epoch, train_dataloader=train_dataloader, **others)
        if self.state.global_step < self.state.max_steps and not self.control.should_training_stop:
            self._stream_ended = self._stream_ended or not hasattr(self.train_dataset, "__len__")

    # Pushes to the Hub

    def init_hf_repo(self, token: str | None = None) -> None:
        if self.args.hub_private_repo is None:
            self.args.hub_private_repo = True
        super().init_hf_repo(token)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write a card into the output folder if it is asked for; TRL's trainers replace it at each checkpoint."""
        if not self.is_saving:
            super().create_model_card(*args, **kwargs)

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
    ) -> Any:
        """Save and push the model and its tokenizer; returns what the Hub answers, or a Future unless `blocking`."""
        if self.hub_model_id is None:
            self.init_hf_repo(token)
        folder = Path(self.args.output_dir) / STAGING / "push"
        self.save_model(str(folder), _internal_call=True)
        if not self.is_world_process_zero():
            return None
        job = self.pushing.push_model(folder, commit_message, token, revision)
        if not blocking:
            return job
        answer = job.result()
        clean_staging(Path(self.args.output_dir))
        return answer

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing: the checkpoint is pushed when it is in its folder."""

    def _finish_current_push(self) -> None:
        self.pushing.finish()


class KeepsLogs(OverTrainer):
    """Mixin for TRL's trainers: checkpoints have what is to be logged next, and the number of tokens so far."""

    _metrics: dict[str, defaultdict[str, list[float]]]

    def logged(self, mode: str) -> defaultdict[str, list[float]]:
        """The values of the batches since the last log of `train` or `eval`, by metric."""
        return self._metrics[mode]

    def running_state(self) -> dict[str, Any]:
        metrics = {name: list(values) for name, values in self.logged("train").items()}
        return super().running_state() | {"metrics": metrics, "tokens": vars(self).get("_total_train_tokens", 0)}

    def restore_running_state(self, state: dict[str, Any]) -> None:
        super().restore_running_state(state)
        self.logged("train").update(state.get("metrics", {}))
        self._total_train_tokens = state.get("tokens", 0)


class MeansOverRows(KeepsLogs):
    """Mixin for trainers whose loss is a mean over the rows of a micro-batch: it becomes a mean over the whole step.

    Rows are the documents of the budget.
    """

    _rows_of_step: float
    _share: float = 1.0  # of the rows of the step that the current micro-batch has, times the number of micro-batches

    @abstractmethod
    def count_rows(self, inputs: dict[str, Tensor]) -> int:
        """Return the number of rows of a batch."""

    def share(self, inputs: dict[str, Tensor]) -> float:
        """Return the weight of a micro-batch in the step of all processes; the mean weight is 1."""
        batches = self.current_gradient_accumulation_steps * self.accelerator.num_processes
        return self.count_rows(inputs) * batches / self._rows_of_step

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Tensor | int | None:
        rows = sum(map(self.count_rows, batch_samples))
        (self._rows_of_step,) = sums_over_ranks([rows], self.accelerator)
        return super()._get_num_items_in_batch(batch_samples, device)

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        self.budget.add(documents=self.count_rows(inputs))
        self._share = self.share(inputs)
        try:
            return super().training_step(model, inputs, num_items_in_batch)
        finally:
            self._share = 1.0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(*args, **kwargs)
        return found if self._share == 1.0 else found * self._share


def _describe(inputs: dict[str, Any]) -> str:
    """Describe the documents of a batch by length and first tokens, so that they can be identified."""
    if isinstance(inputs, list):  # rows of prompts
        return "prompts that start with " + ", ".join(repr(str(row["prompt"])[:60]) for row in inputs[:3])
    side = "" if "input_ids" in inputs else "chosen_"  # of pairs
    ids = inputs[f"{side}input_ids"]
    mask = inputs.get(f"{side}attention_mask")
    lengths = [ids.shape[1]] * len(ids) if mask is None else mask.sum(1).tolist()
    rows = "packed rows" if "position_ids" in inputs else "documents"
    return f"{rows} with {lengths} tokens that start with token ids {ids[:, :8].tolist()}"
