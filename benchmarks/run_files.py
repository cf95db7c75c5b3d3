"""What writing metrics.jsonl and run.json takes of a training step.

    python -m benchmarks.run_files examples/quickstart/tiny.yaml [KEY=VALUE...]

Trains with the config, and prints one line of JSON: the median step in seconds, the mean time per step in the callback,
and their ratio.
"""

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from transformers import TrainerCallback

import ebft
from benchmarks.measuring import stopwatch
from ebft.monitor.run_files import RunFiles


class Steps(TrainerCallback):
    """The time at the start of every step."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.starts.append(time.perf_counter())


def measure(config: ebft.RunConfig) -> dict[str, float]:
    """Train, and return the times."""
    steps, spent = Steps(), {}
    with ExitStack() as watching:
        watching.enter_context(patch("ebft.run.trainer.ProgressBar", steps))
        for name in ("begin", "on_step_end", "on_log"):
            watching.enter_context(stopwatch(RunFiles, name, name, spent, torch.device("cpu")))
        ebft.train(config)
    step = median(after - before for before, after in zip(steps.starts, steps.starts[1:]))
    per_step = sum(spent.values()) / len(steps.starts)
    return {"steps": len(steps.starts), "step_s": step, "run_files_s": per_step, "ratio": per_step / step}


if __name__ == "__main__":
    print(json.dumps(measure(ebft.load_config(Path(sys.argv[1]), sys.argv[2:]))))
