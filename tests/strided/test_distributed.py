"""Two processes, or many micro-batches, give the losses and the parameters of one process with the same batch."""

import pytest
import torch

from tests.ranks import run_module

pytestmark = pytest.mark.slow

COMPARED = ("loss", "grad_norm", "ebft/alignment", "ebft/mean_reward", "ebft/cfm_loss", "ebft/rl_loss", "ebft/ce_loss")
COMPARED += ("ebft/rl_grad_norm", "ebft/ce_grad_norm", "budget/documents", "budget/generated_tokens")
# Not the FLOPs: an accumulating step has no single pass.


def short_run(path, processes, *options):
    run_module("tests.strided.short_run", processes, str(path), *options)
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
            found = split["parameters"][parameter]
            torch.testing.assert_close(found, value, atol=1e-12, rtol=0, msg=f"{name}: {parameter}")
