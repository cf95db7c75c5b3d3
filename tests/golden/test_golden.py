"""Every number that a run logs is the one in its golden file: what a change of structure must not change."""
# On the processor and with the libraries of the golden file all digits are compared. Elsewhere kernels add in another
# order, which can change a sampled token and all that follows: the first STEPS_ELSEWHERE steps within a tolerance.

import json

import pytest

from tests.golden.runs import FOLDER, RUNS, machine, run

STEPS_ELSEWHERE = 4
SLOW = ("strided_packed", "structured_cross_entropy")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in RUNS])
def test_the_run_logs_what_its_golden_file_says(name, tmp_path):
    golden = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    found = {"machine": machine(), **run(name, tmp_path)}
    if golden["machine"] == found["machine"]:
        assert found == golden
    else:
        assert [sorted(entry) for entry in found["steps"]] == [sorted(entry) for entry in golden["steps"]]
        for wanted, got in zip(golden["steps"][:STEPS_ELSEWHERE], found["steps"]):
            assert got == pytest.approx(wanted, rel=1e-3, abs=1e-4)
        assert golden["weight_norms"].keys() == found["weight_norms"].keys()


def test_every_golden_file_is_of_a_run_and_has_its_ten_steps():
    assert {path.stem for path in FOLDER.glob("*.json")} == set(RUNS)
    for name in RUNS:
        golden = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        assert [entry["step"] for entry in golden["steps"] if "loss" in entry] == list(range(1, 11))
        assert any(key.startswith("eval_") for entry in golden["steps"] for key in entry)
