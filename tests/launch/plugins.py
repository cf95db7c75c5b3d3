"""Plugins of training runs that are stopped or fail at a known step."""

import os
import signal
import time

from transformers import TrainerCallback

STEP = 2
LONGEST = 120  # seconds until a signal that does not arrive fails the test


class StopsLaunch(TrainerCallback):
    """Sends SIGTERM to the `ebft train` that started the processes, and waits until it has reached this one."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step != STEP or os.environ["RANK"] != "0":
            return
        arrived, handler = [], signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *given: (arrived.append(given), handler(*given)))
        os.kill(os.getppid(), signal.SIGTERM)
        end = time.monotonic() + LONGEST
        while not arrived and time.monotonic() < end:
            time.sleep(0.01)
        signal.signal(signal.SIGTERM, handler)


class FailsOnRankOne(TrainerCallback):
    """Raises an error on rank 1; rank 0 goes on to the next step, in which it misses rank 1."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == STEP and os.environ["RANK"] == "1":
            raise ValueError("rank one is broken")


class FailsUnlessMarked(TrainerCallback):
    """Raises an error for a learning rate above 0.005 unless the file of the environment variable exists."""

    def on_step_end(self, args, state, control, **kwargs):
        if args.learning_rate > 0.005 and not os.path.exists(os.environ["LAUNCH_TEST_MARK"]):
            raise ValueError("not yet")
