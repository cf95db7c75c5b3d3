"""`ebft show` and `ebft report`."""

import json
import re

import pytest

from tests.dashboard.runs import append, log_line, prompt_entry, strided_entry, write_run
from tests.terminal import Terminal, ebft_command


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path)
    append(tmp_path / "rollouts.jsonl", *(strided_entry(step, rewards=(step, step + 0.5)) for step in range(9)))
    return tmp_path


def test_the_newest_rollouts_beside_their_references(ebft, run):
    result = ebft("show", run)
    assert result.exit_code == 0 and "\x1b" not in result.stdout
    blocks = result.stdout.strip().split("\n\n")
    assert len(blocks) == 5 and blocks[0] == (
        "step 8, token 5  reward +8.500  alignment +8.700  diversity +1.200  advantage +0.250  length 8\n"
        "prompt      def add(a, b):\n            \n" "reference       return a + b\n"
        "completion  completion 1 of step 8"
    )  # fmt: skip


HOSTILE = "a\x1b[31mb\x1b]0;title\x07\r\x08\x7f\x9b2J\u202ec"
UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def test_data_does_not_control_the_terminal(ebft, tmp_path):
    folder = tmp_path / HOSTILE
    folder.mkdir()
    write_run(folder)
    entry = prompt_entry(1)
    entry["prompt"][0]["content"] = entry["ground_truth"] = HOSTILE
    entry["samples"][0] |= {"replies": [HOSTILE], "rewards": {HOSTILE: 0.5}}
    append(folder / "rollouts.jsonl", entry)
    values = {"base_model": HOSTILE, HOSTILE: 1, "datasets": [{"path": HOSTILE, "type": HOSTILE}]}
    (folder / "run.yaml").write_text(json.dumps(values))
    commands = [
        *(["show", folder, *options] for options in ([], ["--json"], ["--sort", HOSTILE], ["--full", "--best"])),
        *(["config", "--check", folder / "run.yaml"], ["doctor", folder / "run.yaml"], ["config", HOSTILE]),
        *(["report", folder], ["report", folder / "none"], ["fetch", HOSTILE], ["inference", folder / "none"]),
        *(["train", folder / "run.yaml", f"{HOSTILE}=1"], ["evaluate", folder / "run.yaml", "--model", HOSTILE]),
    ]
    for command in commands:
        result = ebft(*command)
        assert result.output.strip() and isinstance(result.exception, SystemExit | None), command
        assert not UNPRINTABLE.search(result.output), command
    assert f"rewards/{HOSTILE}" in json.loads(ebft("show", folder, "--json").stdout)[0]["terms"]


def test_the_choice_as_json(ebft, run):
    found = json.loads(ebft("show", run, "--sort", "diversity", "--step", "3", "--count", "2", "--json").stdout)
    assert [sample["completion"] for sample in found] == ["completion 0 of step 3", "completion 1 of step 3"]
    assert found[0]["prompt"] == "def add(a, b):\n" and found[0]["terms"]["length"] == 8


def test_the_pager_gets_the_rollouts(run):
    """In a terminal, with a pager that prints."""
    terminal = Terminal(ebft_command("show", str(run), "--worst", "--interactive"), {"PAGER": "cat"})
    assert terminal.end() == 0 and b"completion 0 of step 0" in terminal.output
    assert terminal.output.count(b"advantage") == 18


def test_a_report_is_written_for_any_run(ebft, refused, tmp_path):
    assert "has none of run.json, metrics.jsonl and rollouts.jsonl" in refused("report", tmp_path)
    write_run(tmp_path, step=1)
    append(tmp_path / "metrics.jsonl", log_line(1))
    result = ebft("report", tmp_path)
    assert result.exit_code == 0 and result.stdout.strip() == str(tmp_path / "report.html")
    assert "running, step 1 of 100" in (tmp_path / "report.html").read_text()
    (tmp_path / "other.json").write_text("{}")
    for name in ("other.json", "nope.json"):
        said = refused("report", tmp_path, "--evaluation", tmp_path / name)
        assert "is not a result of `ebft evaluate --output`" in said
