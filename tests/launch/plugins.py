"""Plugins of training runs that are stopped or fail at a known step."""

import os
import signal
from pathlib import Path

from transformers import TrainerCallback

from tests.launch.worker_stub import wait_until

STEP = 2
COMMAND = "EBFT_TEST_COMMAND"  # environment variable: a file with the process id of the command that is running


class StopsLaunch(TrainerCallback):
    """Sends SIGTERM to the `ebft train` that started the processes, and waits until it has reached this one."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step != STEP or os.environ["RANK"] != "0":
            return
        arrived, handler = [], signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *given: (arrived.append(given), handler(*given)))
        os.kill(os.getppid(), signal.SIGTERM)
        wait_until(lambda: arrived)
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


class KilledOnce(TrainerCallback):
    """Kills rank 1 one step after the first checkpoint, in the first attempt."""

    def on_step_end(self, args, state, control, **kwargs):
        mark = Path(args.output_dir, "killed")
        if state.global_step == STEP + 1 and os.environ["RANK"] == "1" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class StopsCommand(TrainerCallback):
    """Sends SIGTERM to the command, which does not start this process itself, in the second step."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == STEP and os.environ["RANK"] == "0":
            os.kill(int(Path(os.environ[COMMAND]).read_text()), signal.SIGTERM)
