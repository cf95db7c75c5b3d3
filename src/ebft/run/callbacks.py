"""What profiles steps of training, and what may end it: evaluations and losses that are no better, and signals."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks

from ebft import errors, files, machine, printed
from ebft.models.weights import round_weights
from ebft.monitor.budget import stop_training
from ebft.run.config.schema import RunConfig
from ebft.trainer import OverTrainer

_ALLOCATIONS = 1_000_000  # of a profiled step that its snapshot has
_PATIENCE = 3  # of loss_watchdog_threshold


def callbacks_of(config: RunConfig) -> Iterator[TrainerCallback]:
    """The callbacks for `early_stopping_patience`, `loss_watchdog_threshold`, `qat`, `fp8` and `profiler_steps`."""
    if config.early_stopping_patience is not None:
        yield EarlyStopping(config.early_stopping_patience)
    if config.loss_watchdog_threshold is not None:
        yield LossWatchdog(config.loss_watchdog_threshold, config.loss_watchdog_patience or _PATIENCE)
    if config.fp8 or config.qat is not None:
        yield RoundWeights((config.qat and config.qat.fake_quant_after_n_steps) or 0)
    if config.profiler_steps is not None:
        yield ProfileSteps(profiled_steps(config.profiler_steps, config.profiler_steps_start))


class RoundWeights(TrainerCallback):
    """Starts the rounding of `qat` or `fp8` after a number of steps; 0: before the evaluation at the start."""

    def __init__(self, after: int) -> None:
        self._after = after

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_step_begin(args, state, control, **kwargs)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self._after:
            round_weights(kwargs["model"])


class ProfileSteps(TrainerCallback):
    """Writes a trace of each of these steps, on every process, and with CUDA a snapshot of the memory."""

    def __init__(self, steps: Collection[int]) -> None:
        self.steps = frozenset(steps)
        self._profiler: profile | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        never = sorted(step for step in self.steps if not state.global_step < step <= state.max_steps)
        if never:
            errors.warn(
                f"profiler_steps: {', '.join(map(str, never))} is not profiled: training runs from step "
                f"{state.global_step + 1} to step {state.max_steps}."
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 in self.steps:
            if torch.cuda.is_available():
                torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS)
            self._profiler = profile(record_shapes=True, profile_memory=True)
            self._profiler.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        folder = Path(args.output_dir) / "profiler"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"rank{args.process_index}.step{state.global_step}"
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(str(folder / f"{name}.memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        profiler.export_chrome_trace(str(folder / f"{name}.pt.trace.json"))


def profiled_steps(steps: int | list[int] | None, start: int | None) -> Collection[int]:
    """The steps that the keys `profiler_steps` and `profiler_steps_start` name, counted from 1."""
    if isinstance(steps, int):
        return range((start or 0) + 1, (start or 0) + steps + 1)
    return steps or ()


def keep_going_without_trackers(trainer: OverTrainer) -> None:
    """Make errors of trackers warnings, except at the start of training."""
    kinds = tuple(get_reporting_integration_callbacks(trainer.args.report_to))
    events = [name for name in vars(TrainerCallback) if name.startswith("on_") and name != "on_train_begin"]
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, kinds):
            name = type(callback).__name__.removesuffix("Callback")
            callback.on_train_begin = errors.doing(f"starting the tracker {name}")(callback.on_train_begin)
            for event in events:
                setattr(callback, event, _warning(getattr(callback, event), name))


def _warning(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            errors.warn(f"The tracker {name} failed, so its logs are incomplete: {errors.cause(error)}")

    return call


class EarlyStopping(EarlyStoppingCallback):
    """transformers' callback, which continues to count in a resumed run, and whose last step is saved."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.early_stopping_patience_counter = _counted(state.stateful_callbacks)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        super().on_evaluate(args, state, control, metrics, **kwargs)
        if control.should_training_stop and self.early_stopping_patience_counter >= self.early_stopping_patience:
            evaluations = f"{self.early_stopping_patience} evaluations without a better {args.metric_for_best_model}"
            stop_training(args, state, control, f"{evaluations} (early_stopping_patience)")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        best = state.best_global_step if args.load_best_model_at_end else None
        if best is not None and Path(state.best_model_checkpoint or "").name != f"checkpoint-{best}":
            errors.warn(
                f"The best evaluation was at step {best}, but no checkpoint was saved there, so the result is not "
                "the best model. Set save_steps to eval_steps."
            )


class LossWatchdog(TrainerCallback):
    """Stops training after `patience` logged losses above `threshold` in succession, and saves the last step."""

    def __init__(self, threshold: float, patience: int) -> None:
        self.threshold, self.patience = threshold, patience

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs and _losses_above(self.threshold, state.log_history) >= self.patience:
            losses = f"the last {self.patience} logged losses are above {self.threshold:g}"
            stop_training(args, state, control, f"{losses} (loss_watchdog_threshold)")


def stopped_early(config: RunConfig, checkpoint: Path) -> str | None:
    """The key whose limit the run of a checkpoint has reached before its last step; None if it has not."""
    state = files.json_object(checkpoint / files.STATE)
    counted, patience = _counted(state.get("stateful_callbacks", {})), config.early_stopping_patience
    if patience is not None and counted >= patience:
        return "early_stopping_patience"
    threshold, patience = config.loss_watchdog_threshold, config.loss_watchdog_patience or _PATIENCE
    if threshold is not None and _losses_above(threshold, state.get("log_history", [])) >= patience:
        return "loss_watchdog_threshold or loss_watchdog_patience"
    return None


def _losses_above(threshold: float, log_history: list[dict[str, float]]) -> int:
    """The number of logged losses above the threshold since the last one that is not."""
    losses = [entry["loss"] for entry in log_history if "loss" in entry]
    return next((count for count, loss in enumerate(reversed(losses)) if not loss > threshold), len(losses))


def _counted(callbacks: dict[str, Any]) -> int:
    """The number of evaluations without a better metric, as saved in a trainer state."""
    return callbacks.get(EarlyStopping.__name__, {}).get("attributes", {}).get("early_stopping_patience_counter", 0)


class TrainingInterrupted(KeyboardInterrupt):
    """Training was interrupted by `signal_number`; the message contains the checkpoint and how to resume."""

    def __init__(self, message: str, signal_number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class StopRequested(KeyboardInterrupt):
    """A signal arrived at a point where the run can stop immediately."""


_held = threading.local()  # the signals that a thread had blocked before it forks


def _before_fork() -> None:
    # Python would drop a signal in a new process.
    _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGHUP])


def _after_fork() -> None:
    with suppress(StopRequested):  # of the parent, which has noted the request
        signal.pthread_sigmask(signal.SIG_SETMASK, _held.mask)


def _after_fork_in_child() -> None:
    """Give processes that user code forks, such as workers of a multiprocessing.Pool, the handlers of Python."""
    defaults = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_IGN,
    }
    for number, default in defaults.items():  # a step may need the process until it is saved
        if getattr(signal.getsignal(number), "__func__", None) is StopOnSignal._on_signal:
            signal.signal(number, default)
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


class StopOnSignal(TrainerCallback):
    """Stops a run on Ctrl-C, SIGTERM or SIGHUP: immediately, or where that is not possible, after the step or the save.

    Several processes must stop after the same step, so they always complete it and its evaluation. `requested` is set
    by a signal. `command`: the words of the command that started the run, for the message on how to resume.
    """

    is_ray_worker = False  # whether `ebft train` started this process through Ray Train

    def __init__(self, command: Sequence[str] | None = None) -> None:
        self.command = command
        self.requested = False
        self.signal_number: int = signal.SIGINT
        self.is_saving_model = False  # set while the final model is saved
        self.is_complete = False  # whether it is saved
        self._trainer: OverTrainer | None = None
        self._is_stopping = False  # all processes agreed to stop after this step

    def follow(self, trainer: OverTrainer) -> None:
        """Stop this trainer, whose training starts now."""
        self._trainer = trainer
        trainer.add_callback(self)
        trainer.when_stoppable = self._stop_if_requested

    def request(self, number: int) -> None:
        """Stop as after signal `number`, which another process received; may be called from any thread."""
        self.requested, self.signal_number = True, number

    def listening(self) -> AbstractContextManager[None]:
        """Context manager in which signals are handled; Python delivers them to the main thread only."""
        is_main = threading.current_thread() is threading.main_thread()
        return machine.signal_handler(machine.SIGNALS, self._on_signal) if is_main else nullcontext()

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.requested:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return  # launchers send SIGTERM to their processes repeatedly, followed by SIGKILL if they take too long
        self.request(machine.passed_on(number))
        if self._can_stop():
            raise StopRequested
        if not machine.is_main_process() or machine.has_failed():  # a failed process ends the others
            return
        before = "saving the final model" if self.is_saving_model else "this step and saving a checkpoint"
        printed.say(f"\nStopping after {before}. Press Ctrl-C again to stop immediately.", err=True)

    def _can_stop(self) -> bool:
        if self.is_saving_model:
            return False
        return self._trainer is None or (self._trainer.may_stop and self._trainer.accelerator.num_processes == 1)

    def _stop_if_requested(self) -> None:
        if self.requested and not self._is_stopping and self._can_stop():
            raise StopRequested

    def wait_for_others(self) -> None:
        """Wait until all processes have stopped: launchers end the others soon after the first one has ended."""
        if self._is_stopping:
            self._trainer.accelerator.wait_for_everyone()

    # An update, its log and its checkpoint are completed

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.may_stop = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not on_any_process(self._trainer.accelerator, self.requested):
            return
        self.requested = self._is_stopping = True
        if control.should_evaluate or self._trainer.is_evaluation_due:
            self._trainer.leave_evaluation_pending()
        self._trainer.is_interrupted = True
        control.should_save = control.should_training_stop = True
        control.should_evaluate = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._is_stopping:  # saved, and to be evaluated by the resumed run
            control.should_evaluate = control.should_save = False


def on_any_process(accelerator: Any, here: bool) -> bool:
    """Whether `here` is true on any process: all must stop at the same step, or some would wait forever."""
    if accelerator.num_processes == 1:
        return here
    return bool(accelerator.reduce(torch.tensor(int(here), device=accelerator.device), "sum") > 0)
