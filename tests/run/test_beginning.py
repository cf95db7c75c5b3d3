"""What a run does to the folder of an earlier one, such as a branch from a named checkpoint."""

import json

import pytest

import ebft.over_trainer
from ebft.run.checkpoints import newest_checkpoint
from ebft.run.final import final_step
from tests.run.crash import before, config_of, kill, run


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def checkpoints(folder):
    return {path.name for path in folder.glob("checkpoint-*")}


def steps_with_a_loss(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if "loss" in row]


def test_a_branch_from_a_named_checkpoint_leaves_the_later_ones(inputs, out):
    keys = {"max_steps": 4, "save_total_limit": None, "eval_steps": None, "val_set_size": 0}
    assert run(config_of("sft", inputs, out, **keys)).code == 0 and final_step(out) == 4
    named = {"auto_resume_from_checkpoints": False, "resume_from_checkpoint": str(out / "checkpoint-1")}
    branch = {**keys, "learning_rate": 1e-4}
    failed = run(
        config_of("sft", inputs, out, **branch, **named, datasets=[{"path": "/no.jsonl", "type": "completion"}])
    )
    assert failed.code == 2 and final_step(out) == 4 and len(checkpoints(out)) == 4
    ended = run(
        config_of("sft", inputs, out, **branch, **named),
        before(ebft.over_trainer.OverTrainer, "_save_checkpoint", 2, kill),
    )
    assert ended.code == -9 and "later checkpoints were moved to" in ended.output, ended.output
    assert checkpoints(out) == {"checkpoint-1", "checkpoint-2"} and final_step(out) is None
    assert checkpoints(out / "previous" / "1") == {"checkpoint-2", "checkpoint-3", "checkpoint-4"}
    ended = run(config_of("sft", inputs, out, **branch))
    assert ended.code == 0 and "already complete" not in ended.output and final_step(out) == 4
    assert newest_checkpoint(out).name == "checkpoint-4" and steps_with_a_loss(out) == [1, 2, 3, 4]
