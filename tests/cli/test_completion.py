"""Completion in the shell, through the protocol of bash."""

import pytest
from typer.testing import CliRunner

from ebft.tools.cli import app
from tests.cli.conftest import TERMINAL
from tests.dashboard.runs import append, prompt_entry, write_run

MODES = ["ebft.mode=structured", "ebft.mode=strided"]


@pytest.mark.parametrize(("words", "expected"), [
    ("tr", ["train"]), ("config --che", ["--check"]), ("train --learning-r", ["--learning-rate"]), ("train r", []),
    ("fetch smol", ["smollm2-135m"]), ("fetch ex", ["examples"]),
    ("evaluate run.yaml --model smol", ["smollm2-135m"]), ("quantize configs --type f", ["float8_e4m3fn"]),
    ("show . --sort al", ["alignment"]), ("show run --sort rewards/sh", ["rewards/short"]),
    ("config ebft.str", ["ebft.stride"]), ("config run.yaml ebft.str", ["ebft.stride="]),
    ("train run.yaml ebft.mo", MODES),  # the only key, which has a few values
    ("train run.yaml ebft.mode=str", MODES),
    ("train run.yaml ebft.mode =", ["structured", "strided"]),  # as bash splits it
    ("train run.yaml ebft.mode = stru", ["structured"]), ("train run.yaml seed=1 sample_packing = f", ["false"]),
    ("train run.yaml datasets.1.ds_type=pa", ["datasets.1.ds_type=parquet"]),
    ("train run.yaml learning_rate=", []), ("train run.yaml nothing.at.all=", []),
])  # fmt: skip
def test_what_is_offered_for_the_last_word(words, expected, tmp_path, monkeypatch):
    """A space at the end begins a new word."""
    monkeypatch.chdir(tmp_path)
    if words.startswith("show run"):
        write_run(tmp_path / "run")
        append(tmp_path / "run" / "rollouts.jsonl", prompt_entry(2))
    bash = {"_EBFT_COMPLETE": "complete_bash", "COMP_WORDS": f"ebft {words}"}
    bash["COMP_CWORD"] = str(len(f"ebft {words}".split()) - (not words.endswith(" ")))
    done = CliRunner(env=TERMINAL | bash).invoke(app, [], prog_name="ebft")
    assert done.exception is None and done.stderr == "" and done.stdout.split() == expected
