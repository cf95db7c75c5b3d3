"""Two processes, also under FSDP2, make the steps of one process with the same completions."""

import pytest
import torch

from tests.ranks import run_module

pytestmark = pytest.mark.slow

COMPARED = ("loss", "grad_norm", "reward", "ebft/alignment", "ebft/cfm_loss", "ebft/ce_loss", "kl")
HELD_OUT = ("eval_ce_loss", "eval_ce_loss_all", "eval_cfm_loss", "eval_alignment")
# Fixed completions and greedy ones, with an adapter and full fine-tuning, prompts shared and in TRL's rows; `gathered`
# keeps the parameters gathered between forward and backward. The reference model of grpo-full is sharded, too.
RUNS = ("ebft-lora", "ebft-full", "ebft-lora-rows", "ebft-full-rows", "grpo-full", "grpo-lora-gathered")
RUNS += ("greedy-lora", "greedy-full-rows", "ebft-lora-replicated")
MIXED = "ebft-lora-bf16"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    for processes in (1, 2):
        run_module("tests.structured.sharded_run", processes, str(folder / f"{processes}.pt"), *RUNS, MIXED)
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


def test_mixed_precision(found):
    """The parameters of one process are float32, and those that are gathered bfloat16."""
    for ours, theirs in zip(*(results[MIXED]["logs"] for results in found), strict=True):
        for key in COMPARED[:-1]:
            assert ours[key] == pytest.approx(theirs[key], rel=0.02, abs=0.01), key


def test_processes_agree(tmp_path):
    """Replayed and repeated prompts, the check of samples, and the adapter's synchronisation."""
    run_module("tests.structured.two_processes", 2, str(tmp_path))
