"""What a run does to its output folder: files of others, those of earlier runs, and two runs at the same time."""

import json
import os
import warnings
from pathlib import Path

import pytest

import ebft.run.output
import ebft.trainer
from ebft.errors import ConfigError, SaveError
from ebft.monitor.run_files import set_aside
from ebft.run.checks import check_runnable
from ebft.run.output import _publish, claim, final_step, listed
from ebft.run_files import CARD, HEALTH, METRICS, RUN, START, read_run
from tests.monitor.test_run_files import steps_with_a_loss
from tests.run.crash import before, config_of, kill, run, trained

NEW = {"auto_resume_from_checkpoints": False}
FOREIGN = {
    "README.md": "# My project", "vocab.json": "{}", "train.log": "log of the user", "my_rewards.py": "print()",
    ".git/config": "[core]", "data/rows.jsonl": "{}", "runs/1/events": "of a tracker", "previous/notes.txt": "mine",
    "checkpoint-best/model.safetensors": "weights", "checkpoint-best-2/model.safetensors": "weights",
    "config.json": "{}",  # an adapter has none
}  # fmt: skip


def contents(folder):
    return {name: (folder / name).read_text() for name in FOREIGN}


def write(folder, name, text="x"):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


@pytest.mark.slow
def test_a_project_folder_is_unchanged_by_runs_kills_and_resuming(inputs, tmp_path):
    out = tmp_path / "project"
    for name, text in FOREIGN.items():
        write(out, name, text)
    (out / "link").symlink_to(out / "data")
    config = config_of("strided", inputs, out, max_steps=4)
    trained(config, -9, before(ebft.trainer.OverTrainer, "_save_checkpoint", 3))
    assert contents(out) == FOREIGN
    trained(config, -9, before(ebft.run.output, "publish_files", 1))
    said = trained(config)
    assert f"{out / CARD} was not written by a run, or was edited, so it is kept and no model card" in said
    assert final_step(out) == 4 and contents(out) == FOREIGN
    second = config_of("sft", inputs, out, max_steps=2, **NEW)
    trained(second, -9, before(ebft.run.output, "write_mark", 2))
    trained(second)
    assert contents(out) == FOREIGN and final_step(out) == 2
    assert final_step(out / "previous" / "1") == 4 and (out / "link").is_symlink()
    trained(config_of("sft", inputs, out, max_steps=3))
    assert final_step(out) == 3 and contents(out) == FOREIGN
    with pytest.raises(ConfigError, match="contains config.json, which this run would replace"):
        check_runnable(config_of("sft_full", inputs, out, max_steps=1, **NEW))


def kill_between_files():
    """An injection: a kill after some files of the final model have been moved."""

    def publish(staged, folder, obsolete=()):
        for path in sorted(staged.iterdir())[:4]:
            os.replace(path, folder / path.name)
        kill()

    ebft.run.output.publish_files = publish


@pytest.mark.parametrize("has_run_before", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_killed_between_the_files_of_its_model_continues(has_run_before, inputs, out):
    if has_run_before:
        trained(config_of("sft_full", inputs, out, max_steps=1))
    trained(config_of("sft", inputs, out, max_steps=2, **NEW), -9, kill_between_files)
    assert final_step(out) is None
    assert "was edited" not in trained(config_of("sft", inputs, out, max_steps=2)) and final_step(out) == 2
    assert "trained by SFT" in (out / CARD).read_text() and not (out / "config.json").exists()


# Files in a folder without a run, and the names in the error, if it is refused.
FILES = {
    "a model": ("model.safetensors config.json tokenizer.json", "config.json, model.safetensors, tokenizer.json"),
    "records": ("metrics.jsonl run.json rollouts.jsonl", "metrics.jsonl, rollouts.jsonl, run.json"),
    "a report": ("report.html evaluation.json", "evaluation.json, report.html"),
    "a checkpoint of a user": ("checkpoint-5/notes.txt", "checkpoint-5"),
    "a checkpoint of another program": ("checkpoint-5/trainer_state.json", "checkpoint-5"),
    "a staging folder": ("_saving/notes.txt", "_saving"),
    "a checkpoint of an earlier version": ("checkpoint-5/ebft_run.json", None),
    "other checkpoints": ("checkpoint-best/x checkpoint-5-old/x checkpoint-best-5/x", None),
    "what a killed save left": ("_saving/final/config.json _saving/checkpoint-3.old/x _saving/push/x", None),
    "similar names": ("my_config.json adapter.safetensors rollouts.csv merges.txt model.py", None),
    "of others": ("README.md runs/x/events wandb/x completions/x previous/1/model.safetensors", None),
}


@pytest.mark.parametrize("case", FILES)
def test_files_of_others(case, inputs, out):
    names, told = FILES[case]
    for name in names.split():
        write(out, name)
    config = config_of("sft_full", inputs, out, **NEW)
    if told is None:
        check_runnable(config)
    else:
        with pytest.raises(ConfigError, match=f"output_dir: {out} contains .*{told}, which .*Set output_dir to a new"):
            check_runnable(config)
    if case == "a checkpoint of another program":  # which can be resumed
        check_runnable(config_of("sft_full", inputs, out))
    assert all((out / name).read_text() == "x" for name in names.split())


def test_files_that_cannot_be_moved_are_all_where_they_were(tmp_path, monkeypatch):
    for name in ("a", "b", "c"):
        write(tmp_path, name, name)
    replace = os.replace

    def refuse(path, to):
        if Path(to).name == "b":
            raise PermissionError(13, "Permission denied", str(path))
        replace(path, to)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError):
        set_aside(tmp_path, [tmp_path / name for name in ("a", "b", "c")])
    assert [(tmp_path / name).read_text() for name in ("a", "b", "c")] == ["a", "b", "c"]


def test_a_file_that_was_added_while_the_run_trained_is_not_replaced(tmp_path):
    claim(tmp_path)
    for name in ("config.json", "_saving/final/config.json", "_saving/final/README.md"):
        write(tmp_path, name, name)
    with pytest.raises(SaveError, match="contains config.json, which the run has not written .*complete in .*/final"):
        _publish(tmp_path / "_saving" / "final", tmp_path, 1)
    assert (tmp_path / "config.json").read_text() == "config.json" and not listed(tmp_path)
    assert (tmp_path / "_saving" / "final" / "config.json").is_file()


def test_a_folder_that_is_read_as_data_is_refused(inputs, tmp_path):
    write(tmp_path, "data/rows.txt")
    data = {"path": str(tmp_path / "data"), "type": "completion"}
    of = lambda place, **keys: config_of("sft", inputs, tmp_path / "data" / place, datasets=[data | keys])
    for place in ("", "sub/folder"):
        with pytest.raises(ConfigError, match="is in datasets.0.path: .* all read as data"):
            check_runnable(of(place))
        check_runnable(of(place, data_files="rows.txt"))
    with warnings.catch_warnings(action="error"):
        check_runnable(of(".hidden"))


MISSING = [{"path": "/no.jsonl", "type": "completion"}]
PLAIN = {"eval_steps": None, "val_set_size": 0}
checkpoints = lambda folder: {path.name for path in folder.glob("checkpoint-*")}


@pytest.mark.parametrize("limit", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_a_new_run_in_the_folder_of_another_one_is_the_one_that_resumes(inputs, out, limit):
    keys = {**PLAIN, "save_steps": 2, "save_total_limit": limit}
    trained(config_of("sft", inputs, out, **keys, max_steps=6))
    found, weights = checkpoints(out), (out / "adapter_model.safetensors").read_bytes()
    write(out, "merged/config.json")  # of ebft merge-lora
    keys |= {"max_steps": 4, "learning_rate": 1e-3}
    write(out, HEALTH, '{"step": 1}\n')
    trained(config_of("sft", inputs, out, **keys, **NEW, datasets=MISSING), 2)
    assert final_step(out) == 6 and checkpoints(out) == found
    assert json.loads((out / START).read_text())["state"] == "failed" and read_run(out)["state"] == "finished"
    inject = before(ebft.trainer.OverTrainer, "training_step", 4, kill)
    said, earlier = trained(config_of("sft", inputs, out, **keys, **NEW), -9, inject), out / "previous" / "1"
    assert f"The files of an earlier run were moved to {earlier}" in said
    assert checkpoints(out) == {"checkpoint-2"} and final_step(out) is None
    assert not (out / "adapter_model.safetensors").exists()
    assert checkpoints(earlier) == found and final_step(earlier) == 6 and not (out / START).exists()
    assert all((earlier / name).is_file() for name in (METRICS, RUN, HEALTH))
    assert (earlier / "adapter_model.safetensors").read_bytes() == weights
    assert list((out / "previous").iterdir()) == [earlier]
    assert (earlier / "merged" / "config.json").is_file() and not (out / "merged").exists()
    write(out, "quantized/config.json")
    said = trained(config_of("sft", inputs, out, **keys))
    assert "Models of the run before it was resumed were moved to" in said and not (out / "quantized").exists()
    assert "already complete" not in said and "Optimizer settings differ" not in said and final_step(out) == 4
    assert steps_with_a_loss(out) == [1, 2, 3, 4]


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
