"""Completion in the shell, through the protocol of bash."""

import resource
import subprocess
import sys

import pytest

from tests.cli.conftest import ENVIRONMENT
from tests.dashboard.runs import append, prompt_entry, write_run

CODE = """
import sys, ebft.tools.cli
sys.argv = ["ebft"]
try:
    ebft.tools.cli.app(prog_name="ebft")
finally:
    assert not {"torch", "transformers", "datasets"} & set(sys.modules)
"""


@pytest.fixture
def complete(tmp_path, monkeypatch):
    """`complete(words)`: what is offered for the last word; a space at the end begins a new one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "configs" / "deep").mkdir(parents=True)
    for name in ("deep/one.yml", "deep/two.yaml"):
        (tmp_path / "configs" / name).touch()

    def found(words):
        environment = {**ENVIRONMENT, "_EBFT_COMPLETE": "complete_bash", "COMP_WORDS": words}
        environment["COMP_CWORD"] = str(len(words.split()) - (not words.endswith(" ")))
        done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True)
        assert "AssertionError" not in done.stderr and "Traceback" not in done.stderr
        return done.stdout.split()

    return found


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("ebft tr", ["train"]),
        ("ebft config --ch", ["--check"]),
        ("ebft train ", ["configs/", "run.yaml"]),
        ("ebft doctor r", ["run.yaml"]),
        ("ebft config --check r", ["run.yaml"]),
        ("ebft merge-lora conf", ["configs/deep/one.yml", "configs/deep/two.yaml"]),
        ("ebft report conf", ["configs/", "configs/deep/"]),
        ("ebft inference run.yaml --lora-model-dir configs/d", ["configs/deep/"]),
        ("ebft fetch smol", ["smollm2-135m"]),
        ("ebft fetch ex", ["examples"]),
        ("ebft evaluate run.yaml --model smol", ["smollm2-135m"]),
        ("ebft quantize configs --type ", ["int8", "int4"]),
        ("ebft show . --sort al", ["alignment"]),
    ],
)
def test_files_and_names(complete, words, expected):
    assert complete(words) == expected


@pytest.mark.parametrize("command", ["train", "doctor", "preprocess", "evaluate", "inference", "config --check", "env"])
def test_keys_after_a_config(complete, command):
    assert complete(f"ebft {command} run.yaml ebft.str") == ["ebft.stride="]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("ebft.mo", ["ebft.mode=structured", "ebft.mode=strided"]),  # the only key, which has a few values
        ("ebft.mode=str", ["ebft.mode=structured", "ebft.mode=strided"]),
        ("ebft.mode=", ["ebft.mode=structured", "ebft.mode=strided"]),
        ("ebft.mode =", ["structured", "strided"]),  # as bash splits it
        ("ebft.mode = stru", ["structured"]),
        ("seed=1 sample_packing = f", ["false"]),
        ("ebft.use_whitening=t", ["ebft.use_whitening=true"]),
        ("datasets.1.ds_type=pa", ["datasets.1.ds_type=parquet"]),
        ("datasets.1.rev", ["datasets.1.revision="]),
        ("learning_rate=", []),
        ("nothing.at.all=", []),
    ],
)
def test_values_of_keys(complete, words, expected):
    assert complete(f"ebft train run.yaml {words}") == expected


def test_search_words_are_keys(complete):
    assert complete("ebft config ebft.str") == ["ebft.stride"]


def test_terms_of_the_run(complete, tmp_path):
    write_run(tmp_path)
    append(tmp_path / "rollouts.jsonl", prompt_entry(2))
    assert complete("ebft show . --sort rewards/sh") == ["rewards/short"]


def test_completion_is_fast(complete):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    complete("ebft train run.yaml ebft.str")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU seconds, since others may be using the machine; they then count for more, so this is twice what it takes.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
