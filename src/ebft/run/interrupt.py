"""Ctrl-C or SIGTERM during a run: stop, save a checkpoint of the last completed step, and print how to resume."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from transformers import TrainerCallback

from ebft.launch.worker import has_failed
from ebft.over_trainer import OverTrainer
from ebft.printed import say

_held = threading.local()  # the signals that a thread had blocked before it forks


def _before_fork() -> None:
    _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # Python would drop it in a new process


def _after_fork() -> None:
    with suppress(StopRequested):  # of the parent, which has noted the request
        signal.pthread_sigmask(signal.SIG_SETMASK, _held.mask)


def _after_fork_in_child() -> None:
    """Give processes that user code forks, such as workers of a multiprocessing.Pool, the handlers of Python."""
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if getattr(signal.getsignal(number), "__func__", None) is StopOnSignal._on_signal:
            signal.signal(number, default)
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


class TrainingInterrupted(KeyboardInterrupt):
    """Training was interrupted by a signal; the message contains the checkpoint and how to resume.

    `signal_number` is SIGINT (Ctrl-C) or SIGTERM (sent by job schedulers, for example).
    """

    def __init__(self, message: str, signal_number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class StopRequested(KeyboardInterrupt):
    """A signal arrived at a point where the run can stop immediately."""


class StopOnSignal(TrainerCallback):
    """Stops a run on Ctrl-C or SIGTERM: immediately, or where that is not possible, after the step or the save.

    Several processes must stop after the same step, so they always complete it and its evaluation. `requested` is set
    by a signal. `command`: the words of the command that started the run, for the message on how to resume.
    """

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

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Context manager in which signals are handled."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python delivers signals to the main thread only
            return
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.requested:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return  # launchers send SIGTERM to their processes repeatedly, followed by SIGKILL if they take too long
        self.requested, self.signal_number = True, number
        if self._can_stop():
            raise StopRequested
        if os.environ.get("RANK", "0") != "0" or has_failed():  # a failed process ends the others
            return
        before = "saving the final model" if self.is_saving_model else "this step and saving a checkpoint"
        say(f"\nStopping after {before}. Press Ctrl-C again to stop immediately.", err=True)

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
        if not self._requested_anywhere():
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

    def _requested_anywhere(self) -> bool:
        """Whether any process has a request: all must stop at the same step, or some would wait forever."""
        accelerator = self._trainer.accelerator
        if accelerator.num_processes == 1:
            return self.requested
        flag = torch.tensor(int(self.requested), device=accelerator.device)
        return bool(accelerator.reduce(flag, "sum") > 0)
