"""The study as a user runs it, at a scale that takes minutes: from data to the report, and again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import stored

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# Every kind of cell.
CELLS = ("functions-base-*seed0*", "translation-base-none*", "translation-warm-ebft-mean*", "raw-base-sft*")


def run_study(folder: Path, *arguments: str) -> tuple[int, str]:
    places = ["--output", folder / "output", "--results", folder / "results", "--readme", folder / "README.md"]
    command = [sys.executable, "studies/smollm2/run.py", "--scale", "tiny", "--workers", "1", *places, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode, done.stdout


def results(folder: Path) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in (folder / "results" / "cells").iterdir()}


@pytest.fixture(scope="module")
def first_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    swept = run_study(folder, "--sweep", "--only", "functions-base-sft*")
    assert swept[0] == 0, swept[1]
    # What SFT at the FLOPs of EBFT needs on raw code was not asked for, so that this one cell cannot run.
    status, printed = run_study(folder, "--only", *CELLS)
    assert status == 1 and "raw-base-sft_flops-seed0  failed: ValueError: its steps follow" in printed, printed
    return folder


def test_every_kind_of_cell_is_measured(first_run):
    found = results(first_run)
    assert {cell["cell"]["method"] for cell in found.values()} == {"none", "sft", "sft_flops", "ebft", "rlvr"}
    for name, cell in found.items():
        assert {"commit", "device", "python", "torch"} <= set(cell["machine"]) and cell["stamp"]
        assert cell["command"].startswith("python studies/smollm2/run.py --scale tiny --only")
        if cell["cell"]["measures"] == "humaneval":
            assert set(cell["metrics"]) == {"humaneval_greedy", "humaneval_pass@1", "humaneval_pass@N"}
            continue
        assert {"ce_loss", "cfm_loss", "alignment", "diversity", "cfm_loss_long"} <= set(cell["per_document"])
        assert [x for x, _ in cell["rollouts"]["cfm_loss"]][:4] == [1, 2, 4, 8]
        wanted = {"functions": "parses_greedy", "translation": "chrf_pass@1", "raw": "ce_loss"}[cell["cell"]["task"]]
        assert wanted in cell["per_document"]
        if cell["cell"]["method"] != "none":
            assert cell["cost"]["documents"] > 0 and cell["seconds"]["train"] > 0, name
    assert "corpus_bleu_greedy" in found["translation-base-none-seed0"]["metrics"]


def test_sft_at_equal_flops_spends_what_ebft_spends(first_run):
    cost = {name: cell.get("cost") for name, cell in results(first_run).items()}
    matched, ebft = cost["functions-base-sft_flops-seed0"], cost["functions-base-ebft-mean-seed0"]
    assert matched["documents"] > cost["functions-base-sft-seed0"]["documents"]
    assert matched["flops"] == pytest.approx(ebft["flops"], rel=0.4), "steps are whole, and rows of many lengths"


def test_the_rate_of_the_sweep_is_used(first_run):
    found = results(first_run)
    assert stored.read(first_run / "results" / "sweep.json")["chosen"] == {"functions-sft": 0.002}
    assert found["functions-base-sft-seed0"]["learning_rate"] == 0.002
    assert found["raw-base-sft-seed0"]["learning_rate"] == 0.001  # set by hand
    assert "| functions | SFT | −cross-entropy | **" in (first_run / "README.md").read_text()


def test_the_report_is_made_of_the_results(first_run):
    report = (first_run / "README.md").read_text()
    assert "EBFT, mean" in report and "`translation-base-sft-seed0`" in report.partition("Missing,")[2]
    (first_run / "README.md").unlink()
    run_study(first_run, "--report")
    assert (first_run / "README.md").read_text() == report


def test_a_stopped_run_goes_on_where_it_was(first_run):
    """A lost result is measured again on the model that is there, and nothing else runs."""
    folder, lost = first_run / "results" / "cells", "functions-base-ebft-mean-seed0"
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    old = json.loads((folder / f"{lost}.json").read_text())
    (folder / f"{lost}.json").write_text("{")
    _, printed = run_study(first_run, "--only", "functions-base-*seed0*")
    after = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert {name for name in after if after[name] != before.get(name)} == {f"{lost}.json"}
    assert json.loads((folder / f"{lost}.json").read_text())["metrics"] == old["metrics"]
    log = (first_run / "output" / "logs" / f"{lost}.txt").read_text()
    assert "Training is already complete" in log and printed.count("Made by an earlier run") == 2


def test_no_cell_starts_after_the_hours(first_run):
    _, printed = run_study(first_run, "--only", "translation-base-sft-*", "--hours", "0")
    assert "0 of 1 cells are finished already" in printed
    assert "translation-base-sft-seed0" not in results(first_run)
