"""Every number that a run logs is the one in its golden file: what a change of structure must not change.

On the processor and with the libraries of the golden file all digits of all steps are compared. Elsewhere kernels add
in another order. A difference in the last digits can then change a sampled token, after which all numbers differ, so
only the entries of the first STEPS_ELSEWHERE steps are compared, within TOLERANCE.
"""

import json
import math

import pytest

from tests.golden.runs import FOLDER, RUNS, machine, run

TOLERANCE = {"rel_tol": 1e-3, "abs_tol": 1e-4}
STEPS_ELSEWHERE = 4


@pytest.mark.parametrize("name", RUNS)
def test_the_run_logs_what_its_golden_file_says(name, tmp_path):
    golden = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    found = run(name, tmp_path)
    assert [sorted(entry) for entry in golden["steps"]] == [sorted(entry) for entry in found["steps"]]
    if golden["machine"] == machine():
        assert differences(golden["steps"], found["steps"], is_exact=True) == []
        assert differences([golden["weight_norms"]], [found["weight_norms"]], is_exact=True) == []
    else:
        first = slice(STEPS_ELSEWHERE)
        assert differences(golden["steps"][first], found["steps"][first], is_exact=False) == []
        assert golden["weight_norms"].keys() == found["weight_norms"].keys()


def differences(golden, found, is_exact):
    """What differs, as `entry: key: golden, found`."""
    assert len(golden) == len(found)
    lines = []
    for number, (wanted, got) in enumerate(zip(golden, found)):
        for key in wanted | got:
            a, b = wanted.get(key), got.get(key)
            if a is None or b is None or not (a == b if is_exact else math.isclose(a, b, **TOLERANCE)):
                lines.append(f"entry {number}: {key}: {a}, {b}")
    return lines


def test_a_difference_is_found():
    golden = [{"loss": 1.0, "step": 1}, {"loss": 0.5, "step": 2}]
    found = lambda first, second: [{"loss": first, "step": 1}, {"loss": second, "step": 2}]
    assert differences(golden, found(1.0, 0.5 + 1e-9), is_exact=True) == ["entry 1: loss: 0.5, 0.500000001"]
    assert differences(golden, found(1.0001, 0.5), is_exact=False) == []
    assert differences(golden, [{"loss": 1.01}, golden[1]], is_exact=False) == [
        "entry 0: loss: 1.0, 1.01",
        "entry 0: step: 1, None",
    ]


def test_every_golden_file_is_of_a_run_and_has_its_ten_steps():
    assert {path.stem for path in FOLDER.glob("*.json")} == set(RUNS)
    for name in RUNS:
        golden = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        assert [entry["step"] for entry in golden["steps"] if "loss" in entry] == list(range(1, 11))
        assert any(key.startswith("eval_") for entry in golden["steps"] for key in entry)
