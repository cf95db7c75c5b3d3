"""The study as a user runs it, at a size that takes a minute: from the library's files to the report, and again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from sizes import SIZES, parameters
from stored import store_sweep

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def run_study(folder: Path, *arguments: str) -> tuple[int, str]:
    places = ["--output", folder / "output", "--results", folder / "results", "--readme", folder / "README.md"]
    command = [sys.executable, "studies/stdlib-code/run.py", "--size", "tiny", "--workers", "2", *places, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode, done.stdout


def results(folder: Path) -> dict:
    return json.loads((folder / "results" / "tiny.json").read_text())


@pytest.fixture(scope="module")
def first_run(tmp_path_factory) -> tuple[Path, int]:
    folder = tmp_path_factory.mktemp("study")
    place, card = "functions-base-sft", {"date": "today", "commit": "abc"}
    sweep = {
        "command": "run.py",
        "machine": card,
        "seed": 100,
        "tried": {place: {"0.002": {"objective": -5.0, "ce_loss": 5.0}}},
    }
    store_sweep(folder / "results", "tiny", {**sweep, "chosen": {place: 0.002}})
    return folder, run_study(folder)[0]


def test_every_cell_is_measured(first_run):
    folder, status = first_run
    found = results(folder)
    methods = {cell["cell"]["method"] for cell in found["cells"]}
    assert (status, found["failed"]) == (0, {})
    assert methods == {"none", "sft", "sft_flops", "ebft", "rlvr"}
    for cell in found["cells"]:
        assert {"ce_loss", "cfm_loss", "alignment", "diversity"} <= set(cell["metrics"])
        assert {"commit", "device", "python", "torch"} <= set(cell["machine"])
        if cell["cell"]["task"] == "functions":
            assert {"parses_pass@1", "parses_pass@N", "parses_greedy"} <= set(cell["metrics"])
        if cell["cell"]["method"] != "none":
            assert cell["command"].startswith("ebft train") and cell["cost"]["documents"] > 0


def test_sft_at_equal_flops_spends_what_ebft_spends(first_run):
    folder, _ = first_run
    cost = {cell["cell"]["group"]: cell.get("cost") for cell in results(folder)["cells"]}
    for start in ("base", "warm"):
        matched, ebft = cost[f"functions-{start}-sft_flops"], cost[f"functions-{start}-ebft-centre"]
        assert matched["documents"] > cost[f"functions-{start}-sft"]["documents"]
        assert matched["flops"] == pytest.approx(ebft["flops"], rel=0.3), "steps are whole, and rows of many lengths"


def test_machine_and_rows_are_stored(first_run):
    folder, _ = first_run
    found = results(folder)
    assert found["rows"]["functions_test"] > 0 and found["machine"]["workers"] == 2


def test_the_model_has_the_parameters_that_the_report_says(first_run):
    folder, _ = first_run
    shapes = [tensor.shape for tensor in load_file(folder / "output" / "init" / "model.safetensors").values()]
    assert parameters(SIZES["tiny"]) == sum(shape.numel() for shape in shapes)


def test_report_is_made_of_the_results(first_run):
    folder, _ = first_run
    report = (folder / "README.md").read_text()
    assert "python studies/stdlib-code/run.py --size tiny" in report and "EBFT, last token" in report
    (folder / "README.md").unlink()
    run_study(folder, "--report")
    assert (folder / "README.md").read_text() == report


def test_models_are_removed_and_starts_are_kept(first_run):
    folder, _ = first_run
    assert not list((folder / "output" / "models").iterdir())
    assert (folder / "output" / "warm-functions" / "config.json").is_file()


def test_a_stopped_run_goes_on_where_it_was(first_run):
    folder, _ = first_run
    before = {path.name: path.stat().st_mtime_ns for path in (folder / "output" / "cells").iterdir()}
    lost = "functions-base-sft-seed0.json"
    cell = folder / "output" / "cells" / lost
    old = json.loads(cell.read_text())
    cell.write_text("{")  # as a machine that went down may leave it
    _, printed = run_study(folder)
    after = {path.name: path.stat().st_mtime_ns for path in (folder / "output" / "cells").iterdir()}
    assert {name for name in after if after[name] != before.get(name)} == {lost}
    assert "cells are finished already" in printed and printed.count("Made by an earlier run") == 5
    assert json.loads(cell.read_text())["metrics"] == old["metrics"]


def test_rates_of_a_sweep_are_used_and_shown(first_run):
    folder, _ = first_run
    trained = {cell["cell"]["name"]: cell["command"] for cell in results(folder)["cells"] if "command" in cell}
    assert {name for name in trained if "learning_rate=0.002" in trained[name]} == {
        "functions-base-sft-seed0",
        "functions-base-sft_flops-seed0",
    }
    assert "| functions, base | SFT | −cross-entropy | **-5.000 / 5.000** |" in (folder / "README.md").read_text()
