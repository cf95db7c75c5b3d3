"""The files that describe a run: for every method, on resuming, and in a folder that cannot be written."""

import json
import os
import time

import pytest
from transformers import TrainerState

from ebft import train
from ebft.monitor.run_files import RolloutLog, RunFiles, remove_from_step
from ebft.run_files import EVALUATION, HEALTH, METRICS, PREVIOUS, REPORT, ROLLOUTS, RUN, rollout_files
from tests.monitor.sft_run import plain_trainer
from tests.run.test_methods import quietly
from tests.strided.families import tiny_model

AUTO = "auto_resume_from_checkpoints=true"
read = lambda path: json.loads(path.read_text())
lines = lambda path: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
steps = lambda path: [line["step"] for line in lines(path)]
steps_with_a_loss = lambda folder: [line["step"] for line in lines(folder / METRICS) if "loss" in line]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_description_of_a_run(run_file, out):
    before = time.time()
    result = train(quietly(run_file, ["max_steps=2", "eval_steps=1"]))
    logs, found = result.trainer.state.log_history, lines(out / METRICS)
    assert [entry["step"] for entry in logs] == [line["step"] for line in found]
    for entry, line in zip(logs, found):
        assert before <= line["time"] <= time.time() and {name: line[name] for name in entry} == entry
    assert any("loss" in line for line in found) and any(key.startswith("eval_") for line in found for key in line)
    run = read(out / RUN)
    assert run["state"] == "finished" and run["global_step"] == run["max_steps"] == 2 and run["pid"] == os.getpid()
    assert before <= run["started"] <= run["updated"] <= time.time() and "error" not in run
    assert run["model"] == run["config"]["base_model"] and run["config"]["sequence_len"] == 64
    assert run["changed"]["sequence_len"] == 64 and "learning_rate" not in run["changed"]
    assert {"python", "ebft", "torch"} <= run["versions"].keys() and run["method"]
    assert not list(out.glob("*.part"))


def test_a_resumed_run_has_no_step_twice(run_file, out):
    keys = ["ebft.log_completions=true", "save_strategy=steps", "save_steps=2"]
    train(quietly(run_file, [*keys, "max_steps=3"]))
    write(out / HEALTH, [{"time": 1.0, "step": step, "name": "name"} for step in (1, 3)])
    assert max(steps(out / METRICS)) == 3 and max(steps(out / ROLLOUTS)) == 3
    with pytest.warns(UserWarning, match="later checkpoints were moved to .*previous/1: checkpoint-3"):
        train(quietly(run_file, [*keys, "max_steps=4", f"resume_from_checkpoint={out / 'checkpoint-2'}"]))
    assert steps_with_a_loss(out) == [1, 2, 3, 4] and steps(out / HEALTH) == [1]
    sampled = steps(out / ROLLOUTS)
    assert sampled == sorted(sampled) and {sampled.count(step) for step in range(1, 5)} == {sampled.count(1)}
    assert read(out / RUN)["resumed_from_step"] == 2
    assert [path.name for path in (out / PREVIOUS / "1").iterdir()] == ["checkpoint-3"]


@pytest.mark.filterwarnings("ignore:output_dir", "ignore:Training is already complete")
def test_the_evaluation_of_an_earlier_run_is_not_that_of_a_new_one(run_file, out):
    keys = ["rl=", "save_strategy=steps", "save_steps=1"]
    compared = {"models": [{"model": "a", "metrics": {"x": 1.0}}, {"model": "b", "metrics": {"x": 2.0}}]}
    compared["models"][1]["differences"] = {"x": 1.0}
    out.mkdir()
    for number, run in enumerate((["max_steps=1"], ["max_steps=2", AUTO]), start=1):
        write(out / EVALUATION, [compared])
        train(quietly(run_file, [*keys, *run]))
        assert (out / PREVIOUS / str(number) / EVALUATION).is_file() and not (out / EVALUATION).exists()
        assert "compared with" not in (out / REPORT).read_text()
    write(out / EVALUATION, [compared])
    train(quietly(run_file, [*keys, "max_steps=2", AUTO]))  # nothing to train: it is still the evaluation of this model
    assert (out / EVALUATION).is_file()


def test_removing_lines_of_repeated_steps(tmp_path):
    path = tmp_path / "log.jsonl"
    remove_from_step(path, 3)  # none there
    path.write_text('{"step": 1, "a": 2}\n{"a": 5, "step": 2.0}\nnot json\n{"a": 1}\n[3]\n{"step": 3}\n{"step": 2')
    remove_from_step(path, 3)
    assert path.read_text() == '{"step": 1, "a": 2}\n{"a": 5, "step": 2.0}\n'
    before = path.stat()
    remove_from_step(path, 3)
    assert path.stat().st_ino == before.st_ino  # left as it was
    remove_from_step(path, 1)
    assert list(tmp_path.iterdir()) == []


def test_rotated_rollouts_continue(tmp_path):
    RolloutLog(tmp_path / "new folder", rank=1).write([{"step": 0}])
    assert (tmp_path / "new folder" / "rollouts-rank1.jsonl").read_text() == '{"step": 0}\n'
    log = RolloutLog(tmp_path, max_bytes=60)
    for step in range(6):
        log.write([{"step": step, "text": "ä" * 10}])
    names = [path.name for path in rollout_files(tmp_path)]
    assert names == [f"{ROLLOUTS}.3", f"{ROLLOUTS}.2", f"{ROLLOUTS}.1", ROLLOUTS]
    assert lines(log.path) == [{"step": 5, "text": "ä" * 10}]
    log.continue_from(3)
    assert [step for path in rollout_files(tmp_path) for step in steps(path)] == [2, 3]
    log.write([{"step": 4}])
    assert [step for path in rollout_files(tmp_path) for step in steps(path)] == [2, 3, 4]
    RolloutLog(tmp_path, rank=1).write([{"step": 2}, {"step": 5}])  # of a process that is no longer there
    log.continue_from(4)
    assert steps(tmp_path / "rollouts-rank1.jsonl") == [2]
    (tmp_path / "rollouts-rank1.jsonl").unlink()
    log.continue_from(0)
    assert rollout_files(tmp_path) == [] and len(rollout_files(tmp_path / PREVIOUS / "1")) == 3


def test_values_that_are_not_numbers_are_json(tmp_path):
    logs = {"loss": float("nan"), "a": float("inf"), "none": None, "text": "x", "list": [1]}
    RunFiles(tmp_path, {}).on_log(None, TrainerState(), None, logs=logs)
    line = json.loads((tmp_path / METRICS).read_text(), parse_constant=lambda name: pytest.fail(name))
    expected = {"step": 0, "time": 0, "loss": None, "a": None, "none": None, "text": "x", "list": "[1]"}
    assert line | {"time": 0} == expected


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path):
    for name in (METRICS, RUN):
        (tmp_path / name).mkdir()
    files, trainer = RunFiles(tmp_path, {}), plain_trainer(tmp_path, tiny_model("llama"))
    trainer.add_callback(files)
    with pytest.warns(UserWarning, match="that describe the run will not be complete") as caught:
        files.start()
        files.begin(trainer.state)
        trainer.train()
        files.end("finished")
    assert len([one for one in caught if "will not be complete" in str(one.message)]) == 1
    assert trainer.state.global_step == 3
