"""What writing metrics.jsonl and run.json takes of a training step.

    python -m benchmarks.run_files examples/quickstart/tiny.yaml [KEY=VALUE...]

Trains with the config, and prints one line of JSON: the median step in seconds, the mean time per step in the callback,
and their ratio.
"""

import json
import sys
import time
from pathlib import Path
from statistics import median
from unittest.mock import patch

from transformers import TrainerCallback

import ebft
from ebft.monitor.run_files import RunFiles

METHODS = ("begin", "on_step_end", "on_log")


class Steps(TrainerCallback):
    """The time at the start of every step."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.starts.append(time.perf_counter())


def measure(config: ebft.RunConfig) -> dict[str, float]:
    """Train, and return the times."""
    steps, spent = Steps(), 0.0

    def timed(method):
        def run(*args, **kwargs):
            nonlocal spent
            start = time.perf_counter()
            method(*args, **kwargs)
            spent += time.perf_counter() - start

        return run

    start = RunFiles.start

    def start_and_follow(self, *args):
        start(self, *args)
        for name in METHODS:
            setattr(self, name, timed(getattr(self, name)))

    with (
        patch.object(RunFiles, "start", start_and_follow),
        patch("ebft.run.trainer.ProgressBar", steps),
    ):
        ebft.train(config)
    step = median(after - before for before, after in zip(steps.starts, steps.starts[1:]))
    per_step = spent / len(steps.starts)
    return {"steps": len(steps.starts), "step_s": step, "run_files_s": per_step, "ratio": per_step / step}


if __name__ == "__main__":
    print(json.dumps(measure(ebft.load_config(Path(sys.argv[1]), sys.argv[2:]))))
