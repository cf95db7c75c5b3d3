"""The guard against growing cost: what it measures is exact, and growth fails."""

import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.guard import METHODS, Cost, live_bytes, main, measure

COSTS = {name: Cost(1000 + index, 2000 + index, 1.0) for index, name in enumerate(METHODS)}


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "guard.json"
    assert main(["--write", "--stored", str(path)], COSTS.__getitem__) == 0
    return path


@pytest.mark.parametrize(("quantity", "cost"), [("flops", Cost(1015, 2e3, 1.0)), ("peak_bytes", Cost(1000, 2020, 1.0))])
def test_growth_of_one_percent_fails(stored, capsys, quantity, cost):
    assert main(["--stored", str(stored)], {**COSTS, "strided": cost}.__getitem__) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"strided: {quantity} changed by +1.") and "from" in last


def test_smaller_growth_slower_steps_and_less_memory_pass(stored):
    for cost in (Cost(1009, 2019, 1.0), Cost(1000, 2000, 9.0), Cost(1000, 500, 1.0)):
        assert main(["--stored", str(stored)], {**COSTS, "strided": cost}.__getitem__) == 0


def test_missing_work_fails(stored, capsys):
    assert main(["--stored", str(stored)], {**COSTS, "strided": Cost(980, 2000, 1.0)}.__getitem__) == 1
    assert "strided: flops changed by -2.0%" in capsys.readouterr().out


@pytest.mark.parametrize("quantity", ["flops", "peak_bytes"])
def test_a_stored_nan_fails(stored, quantity):
    record = json.loads(stored.read_text())
    record["methods"]["SFT"][quantity] = float("nan")
    stored.write_text(json.dumps(record))
    assert main(["--stored", str(stored)], COSTS.__getitem__) == 1


def test_a_method_that_is_no_longer_measured_fails(stored, monkeypatch, capsys):
    monkeypatch.delitem(METHODS, "SFT")
    assert main(["--stored", str(stored)], COSTS.__getitem__) == 1
    assert "SFT: is stored, but not measured" in capsys.readouterr().out


def test_a_method_that_is_not_stored_fails(stored, capsys):
    record = json.loads(stored.read_text())
    del record["methods"]["SFT"]
    stored.write_text(json.dumps(record))
    assert main(["--stored", str(stored)], COSTS.__getitem__) == 1
    assert "SFT: nothing is stored" in capsys.readouterr().out


def test_live_tensors_are_counted_once():
    before = live_bytes()
    held = torch.zeros(1000)
    views = [held[:10], held.view(10, 100)]
    with FakeTensorMode():
        traced = torch.zeros(1000)
    assert live_bytes() - before == 4000
    del held, views, traced
    assert live_bytes() == before


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
