"""Two processes, or many micro-batches, give the losses and the parameters of one process with the same batch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COMPARED = ("loss", "grad_norm", "ebft/alignment", "ebft/mean_reward", "ebft/cfm_loss", "ebft/rl_loss", "ebft/ce_loss")
COMPARED += ("ebft/rl_grad_norm", "ebft/ce_grad_norm")
COMPARED += ("budget/documents", "budget/generated_tokens", "budget/flops")


def launch(module, processes, *arguments):
    python = [sys.executable, "-m"]
    if processes > 1:
        python += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "--module"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [*python, module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def short_run(path, processes, *options):
    launch("tests.strided.short_run", processes, str(path), *options)
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize("lora", [0, 1])
def test_two_processes_and_accumulation_equal_one_process(lora, tmp_path):
    whole = short_run(tmp_path / "whole", 1, f"lora={lora}", "per_device_train_batch_size=4")
    moved = {name: (value - whole["before"][name]).abs().max() for name, value in whole["parameters"].items()}
    assert max(moved.values()) > 1e-3  # or there would be nothing to compare
    layouts = {
        "accumulation": (1, "per_device_train_batch_size=1", "gradient_accumulation_steps=4"),
        "two processes": (2, "per_device_train_batch_size=2"),
        "both": (2, "per_device_train_batch_size=1", "gradient_accumulation_steps=2"),
    }
    if not lora:
        layouts = {"both": layouts["both"]}
    for name, (processes, *options) in layouts.items():
        split = short_run(tmp_path / name.replace(" ", "_"), processes, f"lora={lora}", *options)
        assert len(whole["logs"]) == len(split["logs"]) == 4
        for ours, theirs in zip(split["logs"], whole["logs"]):
            for key in COMPARED:
                assert ours[key] == pytest.approx(theirs[key], abs=1e-5, rel=1e-5), (name, key, theirs["step"])
        # Seven documents on two ranks: none is counted twice.
        assert split["held_out"] == pytest.approx(whole["held_out"], abs=1e-5, rel=1e-5), name
        for parameter, value in whole["parameters"].items():
            torch.testing.assert_close(
                split["parameters"][parameter], value, atol=1e-12, rtol=0, msg=f"{name}: {parameter}"
            )


@pytest.mark.parametrize("lora", ["0", "1"])
def test_fsdp_gives_the_loss_and_gradients_of_one_process(lora):
    launch("tests.strided.sharded_run", 2, lora)
