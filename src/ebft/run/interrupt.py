"""Ctrl-C or SIGTERM while training: finish the step, save a checkpoint, and say how to go on."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback


class TrainingInterrupted(KeyboardInterrupt):
    """Training was stopped from outside; the message says where it was saved and how to go on.

    `signal_number` is what stopped it: SIGINT (Ctrl-C) or SIGTERM (a scheduler that wants the machine back).
    """

    def __init__(self, message: str, signal_number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class StopAtStepEnd(TrainerCallback):
    """Stops training with a checkpoint after the step in which `requested` became true on any process."""

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
        """Processes must agree, or one would wait forever for the others."""
        if self.accelerator.num_processes == 1:
            return self.requested
        flag = torch.tensor(int(self.requested), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, "sum") > 0)

    @contextmanager
    def listening(self, trainer: Any) -> Iterator[None]:
        """While this lasts, SIGTERM or Ctrl-C asks for a stop at the end of the step; another Ctrl-C stops at once."""
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
            return  # a launcher repeats SIGTERM to its processes; SIGKILL is what follows if they take too long
        self.requested, self.signal_number = True, number
        print("\nStopping after this step, with a checkpoint. Ctrl-C again stops at once.", file=sys.stderr)
