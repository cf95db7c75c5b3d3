"""Means over seeds, their intervals, and paired differences, by hand."""

import math

import pytest
from intervals import difference, estimate, over_seeds


def cell(group: str, seed: int, **metrics: float) -> dict:
    task, start, method = group.split("-", 2)
    return {"cell": {"task": task, "start": start, "group": group, "seed": seed, "method": method}, "metrics": metrics}


def test_estimate_is_students_interval():
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half == pytest.approx(4.303 * 1 / math.sqrt(3))
    assert (found.low, found.high) == (found.mean - found.half, found.mean + found.half)


def test_one_seed_has_no_interval_and_none_no_estimate():
    assert math.isnan(estimate([1.0]).half)
    assert estimate([]) is None


def test_differences_are_paired_by_seed():
    cells = [cell("raw-base-sft", seed, ce_loss=float(seed)) for seed in range(3)]
    cells += [cell("raw-base-ebft-centre", seed, ce_loss=seed - 0.5) for seed in range(3)]
    found = difference(cells, "raw-base-ebft-centre", "raw-base-sft", "ce_loss")
    assert (found.mean, found.half) == (-0.5, 0.0), "the seeds' own spread is no part of it"
    assert over_seeds(cells, "raw-base-sft", "ce_loss").half > 1


def test_only_seeds_of_both_sides_count():
    cells = [cell("raw-base-sft", seed, ce_loss=1.0) for seed in (0, 1)]
    cells += [cell("raw-base-ebft-centre", seed, ce_loss=0.0) for seed in (1, 2)]
    assert difference(cells, "raw-base-ebft-centre", "raw-base-sft", "ce_loss").count == 1


def test_a_start_is_the_other_side_of_every_seed():
    cells = [cell("raw-base-none", 0, ce_loss=4.0)]
    cells += [cell("raw-base-sft", seed, ce_loss=3.0 + seed) for seed in (0, 1)]
    found = difference(cells, "raw-base-sft", "raw-base-none", "ce_loss")
    assert (found.mean, found.count) == (-0.5, 2)


def test_missing_metrics_are_left_out():
    cells = [cell("raw-base-sft", 0, ce_loss=1.0), cell("raw-base-sft", 1)]
    assert over_seeds(cells, "raw-base-sft", "ce_loss").count == 1
    assert over_seeds(cells, "raw-base-sft", "parses_greedy") is None
