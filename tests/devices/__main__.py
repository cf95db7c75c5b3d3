"""`python -m tests.devices [CASE ...]`: train each case on the pretend accelerator and on CPU, and compare.

Prints what the second step starts and waits for, by line of `src/ebft`. Fails if an operation mixes devices, which
names the line, if a logged number or a trained weight is not the CPU's, or if a step waits more often than it may.
The process is one of its own, since PyTorch starts its threads for the backward passes of a device only once.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import traceback
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import TrainerCallback

import ebft
from tests.devices.pretend import Counts, pretend_device, record, register
from tests.golden.runs import is_of_the_machine, write_inputs

# The kernels of a GPU's choices add in another order than those of a CPU's.
TOLERANCE = 2e-4
# What a GPU does by default, so that the CPU computes the same.
AS_ON_GPU = {"ebft.single_pass": False, "ebft.merge_rollouts": False}
STEPS = {"max_steps": 2, "eval_steps": 2}


@dataclass(frozen=True)
class Case:
    """A golden run with other keys, those of the device alone, and the most waits of a step.

    `copied`: the tokens up to which prompts are copied to their samples.
    """

    golden: str
    keys: dict[str, Any] = field(default_factory=dict)
    on_device: dict[str, Any] = field(default_factory=dict)
    most_waits: int | None = None
    copied: int = 128


@dataclass
class Result:
    """What a run logged, the weights that it trained, and what the device did in its second step."""

    logged: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]
    counts: Counts


CASES = {
    "strided_lora": Case("strided_lora", most_waits=28),
    "strided_full": Case("strided_full", on_device={"ebft.feature_device": "pretend:1"}, most_waits=28),
    "strided_checkpointing": Case("strided_full", {"gradient_checkpointing": True}),
    "strided_single_pass": Case("strided_lora", AS_ON_GPU | {"ebft.single_pass": True, "ebft.merge_rollouts": True}),
    "strided_packed": Case("strided_packed"),
    "strided_accumulation": Case("strided_accumulation", {"ebft.rollout_tokens_per_pass": 64}),
    "strided_dropout": Case("strided_lora", {"lora_dropout": 0.1, "ebft.disable_dropout": False}),
    "strided_resumed": Case("strided_lora", {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}),
    "structured_single_turn": Case("structured_single_turn", most_waits=57),
    "structured_several_turns": Case(
        "structured_several_turns",
        {"gradient_checkpointing": True, "trl.log_completions": True},
        {"ebft.feature_device": "pretend:1"},
        most_waits=75,
    ),
    "structured_batched": Case("structured_several_turns", copied=0, most_waits=74),
    "structured_resumed": Case(
        "structured_single_turn", {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}, most_waits=57
    ),
    "structured_cross_entropy": Case("structured_cross_entropy", most_waits=58),
    "grpo": Case("grpo", most_waits=58),
    **{name: Case(name) for name in ("sft", "dpo", "reward_model", "process_reward_model")},
}


class CountStep(TrainerCallback):
    """Counts from the end of the first step to the end of the second."""

    def __init__(self, counts: Counts):
        self._counts, self.of_step = counts, Counts()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self._before = self._counts.copy()
        elif state.global_step == 2:
            self.of_step = self._counts.since(self._before)


def run(case: Case, folder: Path, on_device: bool, **keys: Any) -> Result:
    """Train a case in `folder`, which contains its inputs."""
    folder.mkdir(exist_ok=True)
    as_on_gpu = AS_ON_GPU if case.golden.startswith("strided") and not on_device else {}
    keys = {**STEPS, **as_on_gpu, **case.keys, **(case.on_device if on_device else {}), **keys}
    config = ebft.load_config(
        write_inputs(case.golden, folder), [f"{key}={json.dumps(value)}" for key, value in keys.items()]
    )
    with contextlib.ExitStack() as during:
        during.enter_context(pretend_device() if on_device else nullcontext())
        step = CountStep(during.enter_context(record()))
        during.enter_context(patch("ebft.run.trainer.ProgressBar", step))
        during.enter_context(patch("ebft.prefix.attention.decoding._SHORT", case.copied))
        during.enter_context(contextlib.redirect_stdout(io.StringIO()))
        during.enter_context(contextlib.redirect_stderr(io.StringIO()))
        during.enter_context(warnings.catch_warnings(action="ignore"))
        trainer = ebft.train(config).trainer
        weights = {key: w.detach().cpu().clone() for key, w in trainer.model.named_parameters() if w.requires_grad}
    # Samples that have ended are computed until the device is asked which have.
    left_out = {"budget/flops"} if hasattr(trainer, "generation") else set()
    logged = [
        {key: value for key, value in entry.items() if not is_of_the_machine(key) and key not in left_out}
        for entry in trainer.state.log_history
    ]
    return Result(logged, weights, step.of_step)


def differences(found: Result, wanted: Result, tolerance: float) -> list[str]:
    """The numbers and weights of two runs that differ by more than `tolerance`."""
    if [sorted(entry) for entry in found.logged] != [sorted(entry) for entry in wanted.logged]:
        return ["other metrics are logged"]
    of_logs = [
        f"entry {number}: {key}: {got[key]}, on CPU {value}"
        for number, (got, expected) in enumerate(zip(found.logged, wanted.logged))
        for key, value in expected.items()
        if not abs(got[key] - value) <= tolerance * max(1.0, abs(value))
    ]
    of_weights = [
        f"{name}: largest difference {(found.weights[name] - weight).abs().max():.1e}"
        for name, weight in wanted.weights.items()
        if not torch.allclose(found.weights[name], weight, rtol=tolerance, atol=tolerance)
    ]
    return of_logs + of_weights


def problems(case: Case, resumes: bool) -> tuple[list[str], Counts]:
    """Train a case on both devices; what is wrong, and what the device did."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = run(case, Path(folder, "cpu"), on_device=False)
        found = run(case, Path(folder, "device"), on_device=True)
        wrong = differences(found, wanted, TOLERANCE)
        if resumes:
            checkpoint = str(Path(folder, "device", "out", "checkpoint-2"))
            other = str(Path(folder, "resumed"))
            again = run(
                case, Path(folder, "device"), on_device=True, resume_from_checkpoint=checkpoint, output_dir=other
            )
            wrong += [f"resumed: {line}" for line in differences(again, found, 0.0)]
    for line, operation in found.counts.waits:
        if operation == "index on CPU" and not line.startswith("("):
            wrong.append(f"{line} indexes a tensor of the device with one on CPU, which is copied and waited for")
    waits = sum(found.counts.waits.values())
    if case.most_waits is not None and waits > case.most_waits:
        wrong.append(f"a step waits {waits} times for the device, and may wait {case.most_waits} times")
    return wrong, found.counts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.devices", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--lines", type=int, default=20, help="print the first lines of each table")
    options = parser.parse_args(arguments)
    register()
    torch.set_num_threads(1)
    fails = False
    for name in options.cases or CASES:
        try:
            wrong, counts = problems(CASES[name], resumes=name.endswith("resumed"))
        except Exception:  # of any kind: the next case is tried
            wrong, counts = [traceback.format_exc()], Counts()
        print(f"{name}: one step\n{counts.table(options.lines)}", flush=True)
        for line in wrong:
            fails = True
            print(f"{name}: WRONG {line}", flush=True)
    return int(fails)


if __name__ == "__main__":
    sys.exit(main())
