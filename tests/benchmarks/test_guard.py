"""The guard against growing cost: what it measures is exact, and growth fails."""

import json
import subprocess
import sys

import pytest

from benchmarks.guard import METHODS, Cost, Launches, main, measure
from benchmarks.kernels import RUNS
from tests.devices.pretend import is_possible

COSTS = {name: Cost(1000 + index, 2000 + index, 1.0) for index, name in enumerate(METHODS)}
STARTS = {"a.py f": 900, "b.py g": 100}, {"a.py f: nonzero": 2, "b.py g: item": 1}
COUNTS = {name: Launches(*STARTS, calls=100) for name in RUNS}


@pytest.fixture
def stored(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.guard.is_possible", lambda: True)  # the counts are given
    path = tmp_path / "guard.json"
    assert main(["--write", "--stored", str(path)], COSTS.__getitem__, COUNTS.__getitem__) == 0
    return path


def guard(stored, cost=None, counts=None, **record) -> int:
    """The exit status with these costs of strided mode, and these methods stored instead (None: not stored)."""
    if record:
        content = json.loads(stored.read_text())
        content["methods"] |= record
        content["methods"] = {name: value for name, value in content["methods"].items() if value is not None}
        stored.write_text(json.dumps(content))
    costs, launches = ((now, {"strided": found} if found else {}) for now, found in ((COSTS, cost), (COUNTS, counts)))
    merged = [(now | changed).__getitem__ for now, changed in (costs, launches)]
    return main(["--stored", str(stored)], *merged)


def test_growth_of_one_percent_and_missing_work_fail(stored, capsys):
    for cost, message in (
        (Cost(1015, 2e3, 1.0), "strided: flops changed by +1."),
        (Cost(1000, 2020, 1.0), "strided: peak_bytes changed by +1."),
        (Cost(980, 2000, 1.0), "strided: flops changed by -2.0%"),
    ):
        assert guard(stored, cost) == 1
        assert capsys.readouterr().out.splitlines()[-1].startswith(message)
    for cost in (Cost(1009, 2019, 1.0), Cost(1000, 2000, 9.0), Cost(1000, 500, 1.0)):
        assert guard(stored, cost) == 0


def test_what_cannot_be_compared_fails(stored, monkeypatch, capsys):
    sft = json.loads(stored.read_text())["methods"]["SFT"]
    for quantity in ("flops", "peak_bytes"):
        assert guard(stored, SFT={**sft, quantity: float("nan")}) == 1
    assert guard(stored, SFT=None) == 1 and "SFT: no costs are stored" in capsys.readouterr().out
    assert guard(stored, SFT=sft) == 0
    monkeypatch.delitem(METHODS, "SFT")
    assert guard(stored) == 1 and "SFT: costs are stored, but not measured" in capsys.readouterr().out


def test_other_kernels_and_more_waits_fail_and_name_their_functions(stored, capsys):
    kernels, waits = COUNTS["strided"].kernels, COUNTS["strided"].waits
    assert guard(stored, counts=Launches(kernels | {"b.py g": 110, "a.py f": 899}, waits)) == 0  # 0.9%
    assert guard(stored, counts=Launches(kernels | {"a.py f": 891}, {})) == 0  # -0.9%
    assert "strided: waits fell from 3 to 0. If that is meant, store it with --write." in capsys.readouterr().out
    assert guard(stored, counts=Launches(kernels | {"b.py g": 90, "c.py h": 21}, waits)) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "strided: kernels grew from 1,000 to 1,011, in these functions:", "    c.py h: 0 -> 21",
    ]  # fmt: skip
    assert guard(stored, counts=Launches(kernels | {"a.py f": 889}, waits)) == 1
    for others in ({}, kernels | {"a.py f": float("nan")}):
        assert guard(stored, counts=Launches(others, waits)) == 1
    assert guard(stored, counts=Launches(kernels, waits | {"a.py f: nonzero": 3})) == 1
    assert [guard(stored, counts=Launches(kernels, waits, calls)) for calls in (90, 105, 106)] == [0, 0, 1]
    assert "waits grew from 3 to 4, in these functions:\n    a.py f: nonzero: 2 -> 3" in capsys.readouterr().out


# In a process of its own, since PyTorch has to know of the device before the first backward pass.
COUNTS_OF_STEPS = """
from unittest.mock import patch
import torch
import ebft.strided.trainer as trainer
from benchmarks.guard import launches

def slower(*args, **kwargs):
    found = match_features(*args, **kwargs)
    assert found.rewards.sum().isfinite().item()
    return found

match_features = trainer.match_features
with patch("benchmarks.kernels.LAYERS", 2), patch("benchmarks.guard.TOKENS", 64):
    first, second = launches("strided"), launches("strided")
    assert first == second and sum(first.kernels.values()) > 1000, (first, second)
    with patch.object(trainer, "match_features", slower):
        more = launches("strided")
added = lambda before, after: {key: n - before.get(key, 0) for key, n in after.items() if n != before.get(key, 0)}
assert added(first.waits, more.waits) == {"strided/trainer.py _match: _local_scalar_dense": 1}
kernels = added(first.kernels, more.kernels)
assert list(kernels) == ["strided/trainer.py _match"] and 2 <= min(kernels.values()) <= 9, kernels
"""


@pytest.mark.slow
@pytest.mark.skipif(not is_possible(), reason="a real accelerator, or a PyTorch without Python backends")
def test_launches_are_exact_and_attributed_to_functions():
    done = subprocess.run([sys.executable, "-c", COUNTS_OF_STEPS], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_measures_are_exact_and_notice_recomputation_and_larger_batches(monkeypatch):
    first, second = measure("SFT"), measure("SFT")
    assert (first.flops, first.peak_bytes) == (second.flops, second.peak_bytes)
    transform, keys = METHODS["SFT"]
    monkeypatch.setitem(METHODS, "SFT", (transform, {**keys, "gradient_checkpointing": True}))
    with_recomputation = measure("SFT")
    assert with_recomputation.flops > 1.1 * first.flops
    monkeypatch.setitem(METHODS, "SFT", (transform, {**keys, "micro_batch_size": 5}))
    assert measure("SFT").peak_bytes > 1.05 * first.peak_bytes
