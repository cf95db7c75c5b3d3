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
from tests.cli.conftest import ebft, plain

__all__ = ["ebft"]


@pytest.fixture
def read(tmp_path):
    def of(text):
        path = tmp_path / "sweep.yaml"
        path.write_text(text, encoding="utf-8")
        return read_sweep(path)

    return of


def test_a_grid_is_every_combination(read):
    found = read("learning_rate: [1.0e-5, 0.001]\nebft.feature_layers: [[0.5], [0.25, 0.75]]\nadapter: [null]\n")
    assert [combination.values for combination in found] == [
        {"learning_rate": rate, "ebft.feature_layers": layers, "adapter": None}
        for rate in (1e-5, 1e-3)
        for layers in ([0.5], [0.25, 0.75])
    ]
    assert found[1].name == "learning_rate=1e-05,ebft.feature_layers=0.25-0.75,adapter=null"
    assert found[1].overrides() == ["learning_rate=1e-05", "ebft.feature_layers=[0.25, 0.75]", "adapter=null"]


def test_a_list_names_the_combinations(read):
    found = read("[{seed: 1}, {seed: 2, base_model: a/b}]")
    assert [one.name for one in found] == ["seed=1", "seed=2,base_model=a-b"]
    assert found[1].overrides() == ["seed=2", 'base_model="a/b"']


def test_names_are_unique_and_short(read):
    same = [one.name for one in read("base_model: [a/b, a-b, c]")]
    assert len(set(same)) == 3 and all(name.startswith("base_model=a-b-") for name in same[:2])
    assert same[2] == "base_model=c"
    long = read(f"base_model: [{'x' * 300}, {'x' * 301}]")
    assert len({one.name for one in long}) == 2 and all(len(one.name) < 140 for one in long)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "expected a mapping of keys to lists of values, or a list of mappings"),
        ("3", "got 3"),
        ("seed: []", "seed: the list is empty"),
        ("seed: 3", r"seed: expected a list of values, got 3. Use \[3\]"),
        ("ebft: {stride: [1]}", r"write the keys of a section with dots, for example ebft.NAME: \[...\]"),
        ("seed: [1]\nseed: [2]", "line 2: invalid YAML: .*duplicate key"),
        ("seed: [1, 1]", "the combination seed=1 occurs more than once"),
        ("[{seed: 1}, {seed: 1}]", "the combination seed=1 occurs more than once"),
        ("[{seed: 1}, {}]", "entry 2: expected a mapping of keys to values"),
        ("[{seed: 1}, seed]", "entry 2: expected a mapping"),
        ("output_dir: [a, b]", "output_dir cannot be swept"),
        ("[{resume_from_checkpoint: a}]", "resume_from_checkpoint cannot be swept"),
        ("1: [1]", "1 is not a config key"),
        ("a..b: [1]", "'a..b' is not a config key"),
        ("a: [", "invalid YAML"),
        ("' ebft.stride': [1]", "' ebft.stride' is not a config key, because it contains a space"),
        ("'output_dir ': [a]", "'output_dir ' is not a config key, because it contains a space"),
        ("[{' learning_rate': 1}]", "' learning_rate' is not a config key, because it contains a space"),
        ("seed: [!!binary aGVsbG8=]", r"seed: \[b'hello'\] cannot be the value of a key .*without a YAML tag"),
        ("[{seed: [1, !!set {a, b}]}]", "seed: .* cannot be the value of a key"),
    ],
)
def test_files_that_are_no_sweep(read, text, message):
    with pytest.raises(ConfigError, match=message):
        read(text)


def test_combinations_are_counted_before_they_are_made(read, tmp_path):
    axes = "\n".join(f"key_{n}: [{', '.join(map(str, range(10)))}]" for n in range(20))
    with pytest.raises(ConfigError, match=f"describes {10**20:,} runs, more than 1,000. .* --max-runs {10**20}"):
        read(axes)
    with pytest.raises(ConfigError, match="describes 1,001 runs"):
        read(str([{"seed": n} for n in range(1001)]))
    assert len(read_sweep(tmp_path / "sweep.yaml", most=1001)) == 1001


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="Cannot read sweep file"):
        read_sweep(tmp_path / "missing.yaml")


@pytest.fixture
def run_file(tiny_llama_dir, tmp_path):
    rows = [
        {
            "prompt": f"question {index}? ",
            "completion": f"the answer is {index * 7}, which is a number that a reader of this row may check",
        }
        for index in range(8)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "run.yaml"
    config = {
        "base_model": str(tiny_llama_dir),
        "datasets": [{"path": str(tmp_path / "rows.jsonl"), "type": "ebft_strided_structured.transform"}],
        "val_set_size": 3,
        "sequence_len": 64,
        "max_steps": 2,
        "save_steps": 1,
        "torch_dtype": "float32",
        "evaluation": {"bootstrap": 0},
        "output_dir": str(tmp_path / "out"),
    }
    path.write_text(json.dumps(config))
    return path


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
    mark, sweep = tmp_path / "mark", tmp_path / "sweep.yaml"
    sweep.write_text("learning_rate: [0.01, 0.001]")
    monkeypatch.setenv("LAUNCH_TEST_MARK", str(mark))
    for name, value in {"COLUMNS": "300", "LINES": "50"}.items():  # both, also in a terminal without capabilities
        monkeypatch.setenv(name, value)  # cells of the table are not broken
    arguments = ("train", run_file, "plugins=[tests.launch.plugins.FailsUnlessMarked]", "--sweep", sweep)
    result = ebft(*arguments)
    assert result.exit_code == 1, result.stderr
    printed = plain(result.stdout)
    assert "failed (exit status 2)" in printed and "finished" in printed and "ce_loss" in printed, result.output
    stored = json.loads((tmp_path / "out" / RESULTS).read_text())
    assert [run["state"] for run in stored["runs"]] == ["failed", "finished"]
    assert stored["runs"][0]["metrics"] == {} and stored["runs"][1]["values"] == {"learning_rate": 0.001}
    assert [words[0] for words in in_process] == ["train", "train", "evaluate"]
    evaluated = json.loads((tmp_path / "out" / "learning_rate=0.001" / "evaluation.json").read_text())
    assert stored["runs"][1]["metrics"] == evaluated["models"][0]["metrics"]

    in_process.clear()
    shown = ebft(*arguments, "--dry-run").stdout
    assert "# learning_rate=0.01\n" in shown and "# learning_rate=0.001: finished\n" in shown and in_process == []
    mark.touch()
    result = ebft(*arguments)
    assert result.exit_code == 0, result.stderr
    assert "Already finished in" in result.stderr
    assert [words[0] for words in in_process] == ["train", "evaluate"]
    assert "learning_rate=0.01" in in_process[0] and "auto_resume_from_checkpoints=true" in in_process[0]
    stored = json.loads((tmp_path / "out" / RESULTS).read_text())
    assert [run["state"] for run in stored["runs"]] == ["finished"] * 2
    assert stored["runs"][0]["metrics"]["ce_loss"] != stored["runs"][1]["metrics"]["ce_loss"]

    in_process.clear()
    assert ebft(*arguments, "max_steps=3").exit_code == 0  # other settings: the runs are continued
    assert [words[0] for words in in_process] == ["train", "evaluate"] * 2
    assert all("auto_resume_from_checkpoints=true" in words for words in in_process if words[0] == "train")
    in_process.clear()
    assert ebft(*arguments, "max_steps=3", "sequence_len=48").exit_code == 0  # what is trained has changed
    assert sum("auto_resume_from_checkpoints=false" in words for words in in_process) == 2


@pytest.mark.parametrize(
    "text, words, message",
    [
        ("learning_rat: [1]", [], "The run learning_rat=1 of the sweep: .*Did you mean 'learning_rate'?"),
        ("learning_rate: [1, -1]", [], "The run learning_rate=-1 of the sweep"),
        ("seed: [1]", ["seed=2"], "seed is swept, so it cannot be overridden"),
        ("seed: [1]", ["val_set_size=0"], "Set test_datasets or val_set_size"),
        ("seed: [1]", ["--num-machines", "2"], "--sweep runs on one machine"),
        ("seed: [1]", ["--num-processes", "0"], "--num-processes 0: expected at least 1"),
    ],
)
def test_errors_come_before_the_first_run(ebft, run_file, in_process, tmp_path, text, words, message):
    (tmp_path / "sweep.yaml").write_text(text)
    result = ebft("train", run_file, "--sweep", tmp_path / "sweep.yaml", *words)
    assert result.exit_code == 2 and in_process == [] and not (tmp_path / "out").exists()
    assert re.search(message, plain(result.stderr), re.DOTALL), result.stderr


def test_the_evaluation_measures_all_runs_alike(run_file, tmp_path):
    """Swept seeds are those of the run, so that nothing it trained on is measured; sections are the config's."""
    (tmp_path / "sweep.yaml").write_text("[{rl: ebft, ebft.mode: strided, ebft.stride: 4, seed: 3}, {seed: 4}]")
    check = lambda words: module.load_config(run_file, words)
    sweep = module.Sweep(run_file, ["max_steps=1"], read_sweep(tmp_path / "sweep.yaml"), LaunchOptions(), check)
    assert sweep._measuring(sweep.runs[0]) == ["max_steps=1", "seed=3"]
    assert sweep.words(sweep.runs[1])[2:4] == ["max_steps=1", "seed=4"]


def test_a_signal_ends_the_sweep(run_file, tmp_path, monkeypatch):
    (tmp_path / "sweep.yaml").write_text("seed: [1, 2]")

    def stopped(words, received, quiet=False):
        signal.raise_signal(signal.SIGTERM)
        return 143

    monkeypatch.setattr(module, "_command", stopped)
    check = lambda words: module.load_config(run_file, words)
    sweep = module.Sweep(run_file, [], read_sweep(tmp_path / "sweep.yaml"), LaunchOptions(), check)
    assert sweep.train_all(lambda line: None) == 143
    assert [run.state for run in sweep.runs] == ["stopped", "not started"]


def test_a_command_is_a_process_that_gets_the_signals(tmp_path, monkeypatch):
    assert _command(["config", "--check", str(tmp_path / "missing.yaml")], []) == 2
    received = []
    monkeypatch.setattr(sys, "executable", str(tmp_path / "sleeps"))
    (tmp_path / "sleeps").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "sleeps").chmod(0o755)
    threading.Timer(0.2, received.append, [signal.SIGTERM]).start()
    assert _command(["train"], received) == 143


def test_a_command_knows_its_parent(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "writes"))
    (tmp_path / "writes").write_text(f'#!/bin/sh\necho "$EBFT_PARENT" > {tmp_path / "parent"}\n')
    (tmp_path / "writes").chmod(0o755)
    assert _command(["train"], []) == 0
    assert (tmp_path / "parent").read_text() == f"{os.getpid()}\n"


@pytest.fixture
def sweep(run_file, tmp_path):
    (tmp_path / "sweep.yaml").write_text("seed: [1]")
    return module.Sweep(
        run_file,
        [],
        read_sweep(tmp_path / "sweep.yaml"),
        LaunchOptions(),
        lambda words: module.load_config(run_file, words),
    )


def test_metrics_of_other_rows_or_of_another_base_model_are_not_used(run_file, tiny_llama_dir, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_llama_dir, model)
    words = [f"base_model={model}", f"output_dir={tmp_path / 'out'}"]

    def identity():
        return module._identity(module.load_config(run_file, words), tmp_path / "out")

    first = identity()
    assert identity() == first
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text().replace("question 3", "question three"))
    second = identity()
    assert second != first
    (model / "model.safetensors").write_bytes(b"other weights")
    assert identity() != second


def test_a_run_with_other_rows_is_trained_again(run_file, sweep, monkeypatch, tmp_path):
    (run,) = sweep.runs
    folder = Path(run.output_dir)
    config = module.load_config(run_file, ["seed=1", f"output_dir={folder}", "auto_resume_from_checkpoints=true"])
    folder.mkdir(parents=True)
    recorded = description(config) | {"state": "finished", "data_digests": data_hashes(config)}
    (folder / "run.json").write_text(json.dumps(recorded))
    monkeypatch.setattr("ebft.run.own_files.final_step", lambda folder: 2)
    assert sweep.is_finished(run) and "auto_resume_from_checkpoints=true" in sweep.words(run)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text().replace("question 3", "question three"))
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
