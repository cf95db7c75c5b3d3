"""Sweeps: the file, the folders of the runs, and their results."""

import json
import os
import re
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest

from ebft.errors import ConfigError
from ebft.run.reporting import data_hashes, description
from ebft.tools.launch import sweep as module
from ebft.tools.launch.plan import LaunchOptions
from ebft.tools.launch.sweep import RESULTS, SweepRun, _command, read_sweep
from tests.cli.conftest import plain


@pytest.fixture
def read(tmp_path):
    def of(text):
        path = tmp_path / "sweep.yaml"
        path.write_text(text, encoding="utf-8")
        return read_sweep(path)

    return of


def test_a_grid_is_every_combination_and_a_list_names_them_and_names_are_unique_and_short(read):
    found = read("learning_rate: [1.0e-5, 0.001]\nebft.feature_layers: [[0.5], [0.25, 0.75]]\nadapter: [null]\n")
    expected = [(rate, layers) for rate in (1e-5, 1e-3) for layers in ([0.5], [0.25, 0.75])]
    names = ("learning_rate", "ebft.feature_layers", "adapter")
    assert [one.values for one in found] == [dict(zip(names, (*values, None))) for values in expected]
    assert found[1].name == "learning_rate=1e-05,ebft.feature_layers=0.25-0.75,adapter=null"
    assert found[1].overrides() == ["learning_rate=1e-05", "ebft.feature_layers=[0.25, 0.75]", "adapter=null"]
    found = read("[{seed: 1}, {seed: 2, base_model: a/b}]")
    assert [one.name for one in found] == ["seed=1", "seed=2,base_model=a-b"]
    assert found[1].overrides() == ["seed=2", 'base_model="a/b"']
    first, second, third = (one.name for one in read("base_model: [a/b, a-b, c]"))
    assert first != second and all(name.startswith("base_model=a-b-") for name in (first, second))
    assert third == "base_model=c"
    first, second = (one.name for one in read(f"base_model: [{'x' * 300}, {'x' * 301}]"))
    assert first != second and max(len(first), len(second)) < 140


@pytest.fixture
def run_file(run_file):
    """Of SFT, with a checkpoint of each of two steps."""
    config = {key: value for key, value in json.loads(run_file.read_text()).items() if key not in ("rl", "ebft", "trl")}
    config |= {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "evaluation": {"bootstrap": 0}}
    run_file.write_text(json.dumps(config))
    return run_file


@pytest.fixture
def sweep_of(run_file, read):
    """`sweep_of(text, *overrides)`: the sweep of this file."""
    check = lambda words: module.load_config(run_file, words)
    return lambda text, *overrides: module.Sweep(run_file, [*overrides], read(text), LaunchOptions(), check)


@pytest.fixture
def in_process(ebft, monkeypatch):
    """The commands of a sweep run in this process; returns the list of their words."""
    done = []

    def run(words, received, quiet=False):
        done.append(words)
        result = ebft(*words)
        print(result.stderr)
        return result.exit_code

    monkeypatch.setattr(module, "_command", run)
    return done


@pytest.mark.slow
def test_a_failed_run_does_not_stop_the_others_and_is_resumed(ebft, run_file, in_process, monkeypatch, tmp_path):
    mark, sweep, out = tmp_path / "mark", tmp_path / "sweep.yaml", tmp_path / "out"
    sweep.write_text("learning_rate: [0.01, 0.001]")
    monkeypatch.setenv("LAUNCH_TEST_MARK", str(mark))
    monkeypatch.setenv("COLUMNS", "40")  # of no terminal: tables are whole
    arguments = ("train", run_file, "plugins=[tests.launch.plugins.FailsUnlessMarked]", "--sweep", sweep)

    def swept(code, *words):
        in_process.clear()
        result = ebft(*arguments, *words)
        assert result.exit_code == code, result.stderr
        stored = json.loads((out / RESULTS).read_text())["runs"]
        return result, stored, [words[0] for words in in_process]

    result, stored, commands = swept(1)
    assert "failed (exit status 1)" in plain(result.stdout), result.output
    assert [run["state"] for run in stored] == ["failed", "finished"] and commands == ["train", "train", "evaluate"]
    assert stored[0]["metrics"] == {} and stored[1]["values"] == {"learning_rate": 0.001}
    evaluated = json.loads((out / "learning_rate=0.001" / "evaluation.json").read_text())
    assert stored[1]["metrics"] == evaluated["models"][0]["metrics"]

    result, _, commands = swept(0, "--dry-run")
    assert "# learning_rate=0.001: finished\n" in result.stdout and commands == []
    mark.touch()
    result, stored, commands = swept(0)
    assert "Already finished in" in result.stderr and commands == ["train", "evaluate"]
    assert {"learning_rate=0.01", "auto_resume_from_checkpoints=true"} <= set(in_process[0])
    assert [run["state"] for run in stored] == ["finished"] * 2
    assert stored[0]["metrics"]["ce_loss"] != stored[1]["metrics"]["ce_loss"]

    assert swept(0, "max_steps=3")[2] == ["train", "evaluate"] * 2  # other settings: the runs are continued
    assert all("auto_resume_from_checkpoints=true" in words for words in in_process if words[0] == "train")
    swept(0, "max_steps=3", "sequence_len=48")  # what is trained has changed
    assert sum("auto_resume_from_checkpoints=false" in words for words in in_process) == 2


@pytest.mark.parametrize("text, words, message", [
    ("seed: []", [], r"seed: expected a list of values, got \[\]"),
    ("[{ebft: {stride: 4}}]", [], "ebft: a mapping would replace the whole section. Write its keys with dots"),
    ("learning_rate: [1, -1]", [], "The run learning_rate=-1 of the sweep"),
    ("seed: [1]", ["seed=2"], "seed is swept, so it cannot be overridden"),
    ("seed: [1]", ["resume_from_checkpoint=a/checkpoint-1"], "each run of a sweep resumes from its own"),
])  # fmt: skip
def test_errors_come_before_the_first_run(ebft, run_file, in_process, tmp_path, text, words, message):
    (tmp_path / "sweep.yaml").write_text(text)
    result = ebft("train", run_file, "--sweep", tmp_path / "sweep.yaml", *words)
    assert result.exit_code == 2 and in_process == [] and not (tmp_path / "out").exists()
    assert re.search(message, plain(result.stderr), re.DOTALL), result.stderr


def test_the_evaluation_measures_all_runs_alike(sweep_of):
    """Swept seeds split the rows as in the run, so that nothing it trained on is measured; sections are not swept."""
    sweep = sweep_of("[{rl: ebft, ebft.mode: strided, ebft.stride: 4, seed: 3}, {seed: 4}]", "max_steps=1")
    assert sweep._measuring(sweep.runs[0]) == ["max_steps=1", "seed=3"]
    assert sweep.words(sweep.runs[1])[2:4] == ["max_steps=1", "seed=4"]


def test_the_table_names_the_best_run(sweep_of):
    sweep = sweep_of("seed: [1, 2, 3]")
    assert sweep.table().caption is None  # nothing was evaluated
    for run, loss, alignment in zip(sweep.runs, (2.5, 2.3, 2.9), (0.3, 0.1, 0.2)):
        run.metrics = {"ce_loss": loss, "alignment": alignment, "diversity": 0.1}
        run.intervals = {"ce_loss": [loss - 0.15, loss + 0.15]}
    table = sweep.table()
    assert table.caption.startswith("Best run by ce_loss: seed=2; alignment: seed=1.")
    columns = {column.header: [*column.cells] for column in table.columns}
    assert columns["ce_loss"] == ["2.5 ~", "2.3 *", "2.9"] and columns["alignment"] == ["0.3 *", "0.1", "0.2"]
    assert columns["diversity"] == ["0.1"] * 3


def test_a_sweep_that_is_repeated_and_interrupted_keeps_its_results(sweep_of, monkeypatch, tmp_path):
    known = lambda name: {"name": name, "state": "finished", "metrics": {"ce_loss": 1.0}, "measured": "the same"}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / RESULTS).write_text(json.dumps({"runs": [known("seed=1"), known("seed=2"), known("seed=0")]}))
    monkeypatch.setattr(module.Sweep, "is_finished", lambda self, run: run.name != "seed=3")
    monkeypatch.setattr(module.Sweep, "_identity", lambda self, run: "the same")
    monkeypatch.setattr(module, "_command", lambda *given, **keys: signal.raise_signal(signal.SIGTERM) or 143)
    sweep = sweep_of("seed: [3, 2, 1]")
    assert sweep.train_all(lambda line: None) == 143
    stored = json.loads((tmp_path / "out" / RESULTS).read_text())["runs"]
    assert [run.state for run in sweep.runs] == ["stopped", "finished", "finished"]
    assert [(run["name"], run["state"], len(run["metrics"])) for run in stored] == [
        ("seed=3", "stopped", 0), ("seed=2", "finished", 1), ("seed=1", "finished", 1), ("seed=0", "finished", 1),
    ]  # fmt: skip


def test_a_command_is_a_process_that_gets_the_signals_and_knows_its_parent(tmp_path, monkeypatch):
    assert _command(["config", "--check", str(tmp_path / "missing.yaml")], []) == 2
    script = tmp_path / "script"
    script.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    received = []
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    threading.Timer(0.2, received.append, [signal.SIGTERM]).start()
    assert _command(["train"], received) == 143
    script.write_text(f'#!/bin/sh\necho "$EBFT_PARENT" > {tmp_path / "parent"}\n')
    assert _command(["train"], []) == 0 and (tmp_path / "parent").read_text() == f"{os.getpid()}\n"


def change(rows):
    rows.write_text(rows.read_text().replace("question 3", "question three"))


def test_metrics_of_other_rows_or_of_another_base_model_are_not_used(sweep_of, tiny_llama_dir, tmp_path):
    shutil.copytree(tiny_llama_dir, tmp_path / "model")
    sweep = sweep_of("seed: [1]", f"base_model={tmp_path / 'model'}")
    identity = lambda: sweep._identity(sweep.runs[0])
    first = identity()
    assert identity() == first
    change(tmp_path / "rows.jsonl")
    second = identity()
    assert second != first
    (tmp_path / "model" / "model.safetensors").write_bytes(b"other weights")
    assert identity() != second


def test_a_run_with_other_rows_is_trained_again(run_file, sweep_of, monkeypatch, tmp_path):
    sweep = sweep_of("seed: [1]")
    (run,) = sweep.runs
    words = ["seed=1", f"output_dir={run.output_dir}", "auto_resume_from_checkpoints=true"]
    config = module.load_config(run_file, words)
    Path(run.output_dir).mkdir(parents=True)
    recorded = description(config) | {"state": "finished", "data_digests": data_hashes(config)}
    Path(run.output_dir, "run.json").write_text(json.dumps(recorded))
    monkeypatch.setattr("ebft.run.output.final_step", lambda folder: 2)
    assert sweep.is_finished(run) and words[2] in sweep.words(run)
    change(tmp_path / "rows.jsonl")
    assert not sweep.is_finished(run) and "auto_resume_from_checkpoints=false" in sweep.words(run)


def test_a_run_is_stored_without_secrets(tmp_path):
    sweep = object.__new__(module.Sweep)
    sweep.config, sweep.overrides, sweep.folder = tmp_path / "run.yaml", [], tmp_path
    sweep.runs = [SweepRun("a", {"hub_token": "hf_secret"}, "a")]
    sweep._save()
    assert "hf_secret" not in (tmp_path / RESULTS).read_text()
    (tmp_path / RESULTS).write_text('{"learning_rate": [1e-4]}')
    with pytest.raises(ConfigError, match="sweep.json is not the result of a sweep, and is kept"):
        sweep._save()
