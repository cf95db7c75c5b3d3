"""Two processes give the rewards, the gradients and the parameters of one process with the same completions."""

import pytest
import torch

from tests.ranks import run_module

pytestmark = pytest.mark.slow

COMPARED = ("grad_norm", "reward", "ebft/alignment", "ebft/cfm_loss", "ebft/ce_loss")


def short_run(path, processes, *options):
    run_module("tests.structured.short_run", processes, str(path), *options)
    return torch.load(path, weights_only=False)


def test_two_processes_and_accumulation_equal_one_process(tmp_path):
    sizes = "per_device_train_batch_size={}", "gradient_accumulation_steps={}"
    layouts = {"whole": (1, 16, 1), "accumulation": (1, 4, 4), "two processes": (2, 4, 2)}
    found = {}
    for name, (processes, batch, accumulation) in layouts.items():
        options = [sizes[0].format(batch), sizes[1].format(accumulation)]
        found[name] = short_run(tmp_path / name.replace(" ", "_"), processes, *options)
    whole = found.pop("whole")
    for name, split in found.items():
        assert len(whole["logs"]) == len(split["logs"]) == 3
        for ours, theirs in zip(split["logs"], whole["logs"]):
            for key in COMPARED:
                assert ours[key] == pytest.approx(theirs[key], abs=2e-5, rel=2e-5), (name, key, theirs["step"])
        for parameter, value in whole["parameters"].items():
            torch.testing.assert_close(
                split["parameters"][parameter], value, atol=2e-5, rtol=0, msg=f"{name}: {parameter}"
            )
