"""Ctrl-C or SIGTERM during training: finish the step, save a checkpoint, and print how to resume."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback


class TrainingInterrupted(KeyboardInterrupt):
    """Training was interrupted by a signal; the message contains the checkpoint and how to resume.

    `signal_number` is SIGINT (Ctrl-C) or SIGTERM (sent by job schedulers, for example).
    """

    def __init__(self, message: str, signal_number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class StopAtStepEnd(TrainerCallback):
    """Stops training and saves a checkpoint after the step in which `requested` is set on any process."""

    def __init__(self) -> None:
        self.requested = False
        self.signal_number: int = signal.SIGINT
        self.accelerator: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._requested_anywhere():
            self.requested = True
            control.should_save = True
            control.should_training_stop = True

    def _requested_anywhere(self) -> bool:
        """Whether any process has a request: all must stop at the same step, or some would wait forever."""
        if self.accelerator.num_processes == 1:
            return self.requested
        flag = torch.tensor(int(self.requested), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, "sum") > 0)

    @contextmanager
    def listening(self, trainer: Any) -> Iterator[None]:
        """Context manager in which SIGTERM or Ctrl-C stops training after the step, and another Ctrl-C immediately."""
        self.accelerator = trainer.accelerator
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
        print(
            "\nStopping after this step and saving a checkpoint. Press Ctrl-C again to stop immediately.",
            file=sys.stderr,
        )
