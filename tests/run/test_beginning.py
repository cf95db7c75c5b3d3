"""What a run does to the folder of an earlier one: branches from a named checkpoint, and two runs at the same time."""

import errno
import json
import os
import subprocess
import threading
import warnings
from pathlib import Path

import pytest

import ebft.trainer
from ebft.errors import ConfigError
from ebft.run.checkpoints import newest_checkpoint
from ebft.run.checks import check_runnable
from ebft.run.output import LOCK, final_step, output_lock, wait_until_free
from tests.run.crash import before, config_of, kill, run, trained

MISSING = [{"path": "/no.jsonl", "type": "completion"}]
PLAIN = {"eval_steps": None, "val_set_size": 0}
NEW = {"auto_resume_from_checkpoints": False}


def checkpoints(folder):
    return {path.name for path in folder.glob("checkpoint-*")}


def steps_with_a_loss(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if "loss" in row]


def test_a_branch_from_a_named_checkpoint_leaves_the_later_ones(inputs, out):
    keys = {**PLAIN, "max_steps": 4, "save_total_limit": None}
    trained(config_of("sft", inputs, out, **keys))
    assert final_step(out) == 4
    branch = {**keys, "learning_rate": 1e-4}
    named = {**branch, **NEW, "resume_from_checkpoint": str(out / "checkpoint-1")}
    trained(config_of("sft", inputs, out, **named, datasets=MISSING), 2)
    assert final_step(out) == 4 and len(checkpoints(out)) == 4
    inject = before(ebft.trainer.OverTrainer, "_save_checkpoint", 2, kill)
    assert "later checkpoints were moved to" in trained(config_of("sft", inputs, out, **named), -9, inject)
    assert checkpoints(out) == {"checkpoint-1", "checkpoint-2"} and final_step(out) is None
    assert checkpoints(out / "previous" / "1") == {"checkpoint-2", "checkpoint-3", "checkpoint-4"}
    assert "already complete" not in trained(config_of("sft", inputs, out, **branch)) and final_step(out) == 4
    assert newest_checkpoint(out).name == "checkpoint-4" and steps_with_a_loss(out) == [1, 2, 3, 4]


@pytest.mark.parametrize("limit", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_a_new_run_in_the_folder_of_another_one_is_the_one_that_resumes(inputs, out, limit):
    keys = {**PLAIN, "save_steps": 2, "save_total_limit": limit}
    trained(config_of("sft", inputs, out, **keys, max_steps=6))
    found, weights = checkpoints(out), (out / "adapter_model.safetensors").read_bytes()
    keys |= {"max_steps": 4, "learning_rate": 1e-3}
    trained(config_of("sft", inputs, out, **keys, **NEW, datasets=MISSING), 2)
    assert final_step(out) == 6 and checkpoints(out) == found
    inject = before(ebft.trainer.OverTrainer, "training_step", 4, kill)
    said, earlier = trained(config_of("sft", inputs, out, **keys, **NEW), -9, inject), out / "previous" / "1"
    assert f"The files of an earlier run were moved to {earlier}" in said
    assert checkpoints(out) == {"checkpoint-2"} and final_step(out) is None
    assert not (out / "adapter_model.safetensors").exists()
    assert checkpoints(earlier) == found and final_step(earlier) == 6 and (earlier / "metrics.jsonl").is_file()
    assert (earlier / "adapter_model.safetensors").read_bytes() == weights
    assert list((out / "previous").iterdir()) == [earlier]
    said = trained(config_of("sft", inputs, out, **keys))
    assert "already complete" not in said and "Optimizer settings differ" not in said and final_step(out) == 4
    assert steps_with_a_loss(out) == [1, 2, 3, 4]


def test_a_run_that_would_move_the_checkpoint_that_it_starts_from_is_refused(inputs, out):
    (out / "checkpoint-2").mkdir(parents=True)
    (out / "checkpoint-2" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="contains lora_model_dir: .*/checkpoint-2, a checkpoint of an earlier run"):
        check_runnable(config_of("sft", inputs, out, lora_model_dir=str(out / "checkpoint-2")))


def test_a_second_run_in_the_same_folder_is_an_error_until_the_first_ends(inputs, out):
    def start_another():
        second = run(config_of("sft", inputs, out, max_steps=1))
        Path(f"{out}-second").write_text(f"{second.code}\n{os.getpid()}\n{second.output}")
        kill()

    config = config_of("sft", inputs, out, max_steps=1, **NEW)
    trained(config, -9, before(ebft.trainer.OverTrainer, "_save_checkpoint", 1, start_another))
    code, pid, output = Path(f"{out}-second").read_text().split("\n", 2)
    assert code == "2" and f"is used by another run (process {pid} on " in output
    trained(config)  # the lock ended with the process


def test_the_lock_is_held_by_the_main_process_and_not_by_its_children(tmp_path, monkeypatch):
    with output_lock(tmp_path):
        with pytest.raises(ConfigError, match="is used by another run. Wait"), output_lock(tmp_path):
            pass
        monkeypatch.setenv("RANK", "1")
        with output_lock(tmp_path):
            pass
        monkeypatch.delenv("RANK")
        child = subprocess.Popen(["sleep", "600"], close_fds=False)  # as the managed server
    try:
        opened = [os.path.realpath(path) for path in Path(f"/proc/{child.pid}/fd").iterdir()]
        assert str(tmp_path / LOCK) not in opened
        with output_lock(tmp_path):
            pass
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, None])
def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, number):
    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    if number is None:
        (tmp_path / LOCK).mkdir()
    else:
        monkeypatch.setattr("fcntl.flock", flock)
    for _ in range(2):  # the second as after a SIGKILL of the first, which releases nothing
        with warnings.catch_warnings(record=True, action="always") as caught:
            holding = output_lock(tmp_path)
            holding.__enter__()
        (said,) = [str(warning.message) for warning in caught]
        assert f"output_dir: {tmp_path} cannot be locked" in said and "would not be detected" in said


def test_a_restarted_run_waits_for_the_lock_of_the_one_that_is_being_killed(tmp_path):
    waiting = threading.Thread(target=wait_until_free, args=(tmp_path, 600))
    with output_lock(tmp_path):
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        wait_until_free(tmp_path, 0)  # gives up: the error is that of `output_lock`
    waiting.join(600)
    assert not waiting.is_alive()
    with output_lock(tmp_path):
        pass
