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


def guard(stored, cost=None, **record) -> int:
    """The exit status with this cost of strided mode, and these methods stored instead (None: not stored)."""
    if record:
        content = json.loads(stored.read_text())
        content["methods"] |= record
        content["methods"] = {name: value for name, value in content["methods"].items() if value is not None}
        stored.write_text(json.dumps(content))
    return main(["--stored", str(stored)], (COSTS | ({"strided": cost} if cost else {})).__getitem__)


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        (Cost(1015, 2e3, 1.0), "strided: flops changed by +1."),
        (Cost(1000, 2020, 1.0), "strided: peak_bytes changed by +1."),
        (Cost(980, 2000, 1.0), "strided: flops changed by -2.0%"),
    ],
)
def test_growth_of_one_percent_and_missing_work_fail(stored, capsys, cost, message):
    assert guard(stored, cost) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(message) and "from" in last


def test_smaller_growth_slower_steps_and_less_memory_pass(stored):
    for cost in (Cost(1009, 2019, 1.0), Cost(1000, 2000, 9.0), Cost(1000, 500, 1.0)):
        assert guard(stored, cost) == 0


def test_what_cannot_be_compared_fails(stored, monkeypatch, capsys):
    sft = json.loads(stored.read_text())["methods"]["SFT"]
    for quantity in ("flops", "peak_bytes"):
        assert guard(stored, SFT={**sft, quantity: float("nan")}) == 1
    assert guard(stored, SFT=None) == 1 and "SFT: nothing is stored" in capsys.readouterr().out
    assert guard(stored, SFT=sft) == 0
    monkeypatch.delitem(METHODS, "SFT")
    assert guard(stored) == 1 and "SFT: is stored, but not measured" in capsys.readouterr().out


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
