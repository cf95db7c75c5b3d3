"""Two processes, also under FSDP2, make the steps of one process with the same completions."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.ranks import run_module
from tests.structured.conftest import chat_model

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


def test_the_command_trains_saves_and_resumes(tmp_path, chat_tokenizer):
    chat_model(chat_tokenizer).save_pretrained(tmp_path / "base")
    chat_tokenizer.save_pretrained(tmp_path / "base")
    line = lambda i: {"input": f"say {i} " + "word " * (i % 4), "output": "it is " + "so " * (i % 3) + str(i)}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line(i)) + "\n" for i in range(10)))
    data = {"path": str(tmp_path / "rows.jsonl"), "type": "tests.structured.real_text.transform"}
    config = {"base_model": str(tmp_path / "base"), "datasets": [data], "output_dir": str(tmp_path / "out")}
    config |= {"rl": "ebft", "ebft": {"ce_coef": 0.2, "gt_length_floor": 2}, "bf16": False}
    config |= {"trl": {"num_generations": 2, "max_completion_length": 8}, "fsdp": True}
    config |= {"fsdp_config": {"fsdp_version": 2}, "val_set_size": 2, "eval_steps": 2, "save_steps": 1, "max_steps": 2}
    config |= {"micro_batch_size": 2, "gradient_accumulation_steps": 1, "learning_rate": 1e-2}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config | {"lr_scheduler": "constant"}))
    resume = [f"output_dir={tmp_path / 'again'}", f"resume_from_checkpoint={tmp_path / 'out' / 'checkpoint-1'}"]
    for overrides in (["logging_steps=1"], resume):
        run_module("ebft", 2, "train", str(path), *overrides)
    first, again, base = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again", "base"))
    state = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    assert any("eval_cfm_loss" in entry for entry in state["log_history"])
    for name, value in base.items():
        assert not torch.equal(first[name], value), name
        torch.testing.assert_close(again[name], first[name], atol=1e-5, rtol=1e-4, msg=name)
