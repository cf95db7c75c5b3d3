"""Two processes with DDP and with FSDP2 train preference methods as one does, and evaluate every held-out row once."""

import json

import pytest
import torch
from safetensors.torch import load_file

from ebft.preferences.over_trl.metrics import held_out_batches
from tests.golden.runs import ROWS
from tests.run.crash import config_of, result, run_processes, write_inputs

FSDP = {"fsdp": True}


@pytest.mark.parametrize(
    ("rows", "batches", "copies"),
    [
        (8, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]], [1, 1]),
        (7, [[[0, 1], [4, 5], [6]], [[2, 3], [4, 5], [6]]], [1, 2, 2]),
        (1, [[[0]], [[0]]], [2]),
    ],
)
def test_rows_without_a_whole_batch_are_evaluated_by_all(rows, batches, copies):
    assert [held_out_batches(rows, 2, rank, 2) for rank in (0, 1)] == [(own, copies) for own in batches]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    for name in ("comparisons", "judged", "steps"):  # two whole batches of four, and three rows that are held out
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]()[:12]))
    return folder


def run(method, inputs, out, count, **changes):
    """What a run of two steps logs, and its weights."""
    common = {"max_steps": 2, "eval_steps": 2, "logging_steps": 1, "val_set_size": 3, "learning_rate": 1e-2}
    common |= {"gradient_accumulation_steps": 1, "eval_batch_size": 2 // count, "micro_batch_size": 4 // count, "lora_dropout": 0.0}
    common |= {"adam_epsilon": 1e-4, "save_steps": 2, "lr_scheduler": "constant"}
    config = config_of(method, inputs, out, **common | changes)
    ended = run_processes(config, count)
    assert {process.code for process in ended} == {0}, ended[0].output + ended[-1].output
    (weights,) = out.glob("*model.safetensors")
    return [entry for entry in result(out)[1] if "train_loss" not in entry], load_file(weights)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "dpo_full", "orpo", "simpo", "reward_model", "process_reward_model"])
def test_two_processes_train_as_one(method, inputs, tmp_path):
    logs, weights = run(method, inputs, tmp_path / "one", 1)
    assert any("eval_loss" in entry for entry in logs)
    before = load_file(inputs / "model" / "model.safetensors")
    assert all((value - before[name]).abs().max() > 1e-3 for name, value in weights.items() if name in before)
    for kind in ({}, FSDP):
        found, trained = run(method, inputs, tmp_path / f"two{len(kind)}", 2, **kind)
        assert len(found) == len(logs)
        for ours, theirs in zip(found, logs):
            for numbers in (ours, theirs):
                numbers.pop("budget/flops", None)  # batches of other sizes have other padding
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5), kind
        assert trained.keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(trained[name], value, atol=1e-5, rtol=0, msg=name)
