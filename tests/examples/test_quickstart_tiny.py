"""The quickstart that needs no download, as a user runs it, at a size that takes seconds."""

import json
from pathlib import Path

import pytest

from tests.examples.runs import run_quickstart

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def first_run(tmp_path_factory) -> tuple[Path, str]:
    output = tmp_path_factory.mktemp("quickstart-tiny")
    return output, run_quickstart("--model", "tiny", "--output", str(output), "--seed", "1")


def test_it_leaves_its_files_and_says_what_was_measured_and_on_what(first_run):
    output, printed = first_run
    summary = json.loads((output / "summary.json").read_text())
    assert summary["seed"] == 1
    assert {"cpu_count", "platform", "python", "torch", "transformers", "ebft", "commit"} <= set(summary["machine"])
    for moment in ("before", "after"):
        assert {"cfm_loss", "alignment", "diversity", "ce_loss", "perplexity"} <= set(summary[moment])
    assert summary["config"]["ebft"]["seed"] == 1 and "max_steps" in summary["config"]["base"]
    assert {"data", "base", "before", "ebft", "after"} <= set(summary["seconds"])
    assert [set(sample) for sample in summary["samples"]] == [{"prompt", "before", "after", "reference"}] * 3
    for file in ("data/held_out.jsonl", "init/config.json", "base/config.json", "ebft/adapter_config.json"):
        assert (output / file).is_file()
    assert (output / "curves.png").stat().st_size > 10_000
    assert "reference" in (output / "samples.txt").read_text()
    assert "ebft train" in printed and "summary.json" in printed
    lines = lambda part: (output / "data" / f"{part}.jsonl").open()
    files = [{json.loads(line)["file"] for line in lines(part)} for part in ("base", "ebft", "held_out")]
    assert all(files) and len(set.union(*files)) == sum(map(len, files)), "parts share no file"


def test_second_run_uses_the_first_ones_base_model(first_run):
    output, _ = first_run
    base = output / "base" / "model.safetensors"
    made = base.stat().st_mtime_ns
    printed = run_quickstart("--model", "tiny", "--output", str(output), "--seed", "2")
    assert printed.count("Made by an earlier run") == 3 and base.stat().st_mtime_ns == made
