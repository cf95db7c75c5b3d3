"""Two processes with DDP and with FSDP2 train preference methods as one does, and evaluate every held-out row once."""

import json

import pytest
import torch
from safetensors.torch import load_file

from ebft.monitor.metrics import held_out_batches
from ebft.preferences import trainers
from tests.golden.runs import ROWS
from tests.run.crash import config_of, result, run_processes, write_inputs

KINDS = [{}, {"fsdp": True}, {"fsdp_version": 2, "fsdp_config": {"cpu_ram_efficient_loading": True}}]


@pytest.mark.parametrize(("rows", "batches", "copies"), [
    (8, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]], [1, 1]), (7, [[[0, 1], [4, 5], [6]], [[2, 3], [4, 5], [6]]], [1, 2, 2]),
    (1, [[[0]], [[0]]], [2]),
])  # fmt: skip
def test_rows_without_a_whole_batch_are_evaluated_by_all(rows, batches, copies):
    assert [held_out_batches(rows, 2, rank, 2) for rank in (0, 1)] == [(own, copies) for own in batches]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    for name in ("comparisons", "judged", "steps"):  # two whole batches of four, and three rows that are held out
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]()[:12]))
    return folder


def run(method, inputs, out, count, prepare=lambda: None, **changes):
    """What a run of two steps logs, and its weights."""
    common = {"max_steps": 2, "eval_steps": 2, "logging_steps": 1, "val_set_size": 3, "learning_rate": 1e-2}
    common |= {"gradient_accumulation_steps": 1, "eval_batch_size": 2 // count, "micro_batch_size": 4 // count,
               "lora_dropout": 0.0}  # fmt: skip
    common |= {"adam_epsilon": 1e-4, "save_steps": 2, "lr_scheduler": "constant"}
    config = config_of(method, inputs, out, **common | changes)
    ended = run_processes(config, count, prepare)
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
    for number, kind in enumerate(KINDS):
        assert_same(run(method, inputs, tmp_path / f"two{number}", 2, **kind), (logs, weights))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "orpo", "simpo", "kto"])
def test_accumulation_and_processes_give_the_numbers_of_one_batch(method, inputs, tmp_path):
    """Means over the tokens of a step, whose micro-batches have unequal numbers of them; KTO in pairs of rows."""
    keys = {"logging_steps": 2} | ({"val_set_size": 4, "eval_batch_size": 2} if method == "kto" else {})
    prepare = pair_two_and_two if method == "kto" else lambda: None
    whole = run(method, inputs, tmp_path / "whole", 1, prepare, **keys)
    splits = {"accumulation": (1, {"micro_batch_size": 2, "gradient_accumulation_steps": 2}), "processes": (2, {})}
    if method != "kto":
        both = {"micro_batch_size": 1, "gradient_accumulation_steps": 2}
        splits |= {"both": (2, both), "rows": (1, {"micro_batch_size": 1, "gradient_accumulation_steps": 4})}
    for name, (processes, changes) in splits.items():
        logs, weights = run(method, inputs, tmp_path / name, processes, **keys, **changes)
        trained = lambda entries: [x for x in entries if "loss" in x]
        ignored = ["epoch", "throughput", "memory"]
        if method == "kto" and processes == 1:
            ignored += ["kl", "loss"]  # the KL term is that of each micro-batch
        kept = [{k: v for k, v in x.items() if not k.startswith(tuple(ignored))} for x in trained(logs)]
        expected = [{k: v for k, v in x.items() if not k.startswith(tuple(ignored))} for x in trained(whole[0])]
        assert_same((kept, whole[1] if "loss" in ignored else weights), (expected, whole[1]))


def assert_same(found, expected):
    assert len(found[0]) == len(expected[0])
    for ours, theirs in zip(found[0], expected[0]):
        # Batches of other sizes have other padding.
        ours, theirs = ({k: v for k, v in x.items() if k not in ("budget/flops", "total_flos")} for x in (ours, theirs))
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, atol=1e-5, rtol=0, msg=name)


def pair_two_and_two():
    """The pairs of the KL term in batches of two, within a batch of four."""
    pairs = trainers.with_other_completions

    def of_halves(rows, spares):
        ids = rows["completion_ids"]
        found = [pairs({"completion_ids": half}, spares) for half in (ids[:2], ids[2:])]
        return {"KL_completion_ids": [other for half in found for other in half["KL_completion_ids"]]}

    trainers.with_other_completions = of_halves


@pytest.mark.slow
def test_a_reference_adapter_and_resuming(inputs, tmp_path):
    """The reference is the adapter that a run continues, also in checkpoints whose parts processes save."""
    run("dpo", inputs, tmp_path / "before", 1)
    keys = {"lora_model_dir": str(tmp_path / "before"), "auto_resume_from_checkpoints": False, "save_steps": 1}
    logs, weights = run("dpo", inputs, tmp_path / "one", 1, **keys)
    # The policy is the reference at first. Without the loaded adapter, its margin would not be 0.
    assert logs[0]["rewards/margins"] == pytest.approx(0, abs=1e-5) and abs(logs[1]["rewards/margins"]) > 1e-3
    parts = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
    for number, kind in enumerate((*KINDS, parts)):
        out = tmp_path / f"two{number}"
        assert_same(run("dpo", inputs, out, 2, **keys, **kind), (logs, weights))
        again = {**keys, **kind, "resume_from_checkpoint": str(out / "checkpoint-1")}
        assert_same(run("dpo", inputs, tmp_path / f"again{number}", 2, **again), (logs, weights))
