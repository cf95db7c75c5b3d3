"""Two processes under FSDP2 make the steps of one process with the same completions."""

import pytest
import torch

from tests.strided.test_distributed import launch

COMPARED = ("loss", "grad_norm", "reward", "ebft/alignment", "ebft/ce_loss", "kl")
HELD_OUT = ("eval_ce_loss", "eval_ce_loss_all", "eval_cfm_loss", "eval_alignment")
# Fixed completions and greedy ones, with an adapter and full fine-tuning, prompts shared and in TRL's rows; `gathered`
# keeps the parameters gathered between forward and backward. The reference model of grpo-full is sharded, too.
RUNS = ("ebft-lora", "ebft-full", "ebft-lora-rows", "ebft-full-rows", "grpo-full", "grpo-lora-gathered")
RUNS += ("greedy-lora", "greedy-full-rows")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    for processes in (1, 2):
        launch("tests.structured.sharded_run", processes, str(folder / f"{processes}.pt"), *RUNS)
    return [torch.load(folder / f"{processes}.pt", weights_only=False) for processes in (1, 2)]


@pytest.mark.parametrize("name", RUNS)
def test_sharding_changes_nothing(found, name):
    whole, sharded = (results[name] for results in found)
    assert whole["sampled"] == sharded["sampled"] and bool(whole["sampled"]) == name.startswith("greedy")
    if whole["sampled"]:
        assert len({len(ids) for step in whole["sampled"] for ids in step}) > 4  # of unequal lengths
    assert len(whole["logs"]) == len(sharded["logs"]) == 2
    shares = "rows" not in name.split("-")  # or each process pads its own rows: other FLOPs, other weights in `kl`
    for ours, theirs in zip(sharded["logs"], whole["logs"]):
        for key in COMPARED if shares else COMPARED[:-1]:
            assert (key in ours) == (key in theirs)
            if key in theirs:
                assert ours[key] == pytest.approx(theirs[key], abs=1e-5, rel=1e-4), (key, theirs["step"])
        # Passes of one token, with which processes stay in step, are counted.
        assert not shares or ours["budget/flops"] == pytest.approx(theirs["budget/flops"], rel=0.01)
    for key in HELD_OUT:
        if key in whole["held_out"]:
            assert sharded["held_out"][key] == pytest.approx(whole["held_out"][key], abs=1e-5, rel=1e-4), key
    assert sharded["parameters"].keys() == whole["parameters"].keys()
    for parameter, value in whole["parameters"].items():
        torch.testing.assert_close(sharded["parameters"][parameter], value, atol=2e-5, rtol=1e-4, msg=parameter)
