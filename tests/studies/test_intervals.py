"""Means over seeds and documents, their intervals, and paired differences, by hand and by resampling."""

import math

import numpy as np
import pytest
from intervals import Measured, difference, estimate, over_seeds, spread_of_files, spread_of_seeds, t_quantile


def cell(group: str, seed: int, weights: tuple[float, ...] = (1.0, 3.0), **sums: list[float]) -> dict:
    task, start, method = group.split("-", 2)
    place = {"task": task, "start": start, "group": group, "seed": seed, "method": method}
    files = [f"{number}.py" for number in range(len(weights))]
    return {
        "cell": place,
        "sums": sums,
        "weights": dict.fromkeys(sums, list(weights)),
        "files": dict.fromkeys(sums, files),
    }


def measured(sums, weights=None, files=None) -> Measured:
    weights = [1.0] * len(sums) if weights is None else weights
    return Measured(list(sums), list(weights), [str(i) for i in range(len(sums))] if files is None else files)


def test_spread_of_seeds_is_students_interval():
    assert spread_of_seeds([1.0, 2.0, 3.0]) == pytest.approx(4.303 * 1 / math.sqrt(3))
    assert math.isnan(spread_of_seeds([1.0])), "one seed says nothing of others"
    assert spread_of_seeds([0.1, 0.1, 0.1]) == 0.0


@pytest.mark.parametrize(("degrees", "quantile"), [(2, 4.303), (11, 2.201), (15, 2.131), (20, 2.086), (10**6, 1.960)])
def test_quantiles_of_students_t(degrees, quantile):
    assert t_quantile(degrees) == pytest.approx(quantile, abs=0.001)


def test_spread_of_files_is_that_of_resampling_them():
    """Files of one to four documents that are alike, of unequal weights, some of them 0."""
    generator = np.random.default_rng(0)
    files = np.repeat(np.arange(120), generator.integers(1, 5, size=120))
    weights = generator.integers(0, 30, size=len(files)).astype(float)
    sums = weights * (generator.normal(2.0, 0.7, size=120)[files] + generator.normal(0.0, 0.2, size=len(files)))
    by_file = [np.bincount(files, values, minlength=120) for values in (sums, weights)]
    draws = generator.integers(0, 120, size=(20_000, 120))
    resampled = by_file[0][draws].sum(1) / by_file[1][draws].sum(1)
    found = spread_of_files(measured(sums, weights, [str(file) for file in files]))
    assert found == pytest.approx(1.98 * resampled.std(), rel=0.03)
    assert found > 1.3 * spread_of_files(measured(sums, weights)), "documents of one file are no independent evidence"


def test_spread_of_files_of_one_document_each_is_that_of_a_mean():
    found = spread_of_files(measured([1.0, 2.0, 3.0, 6.0]))
    assert found == pytest.approx(3.182 * np.std([1, 2, 3, 6], ddof=1) / 2)
    assert math.isnan(spread_of_files(measured([1.0, 2.0], files=["a", "a"])))


def test_an_interval_covers_other_seeds_and_other_files():
    """Of studies with three seeds and twenty files, some 95% have the true mean in their interval, no fewer."""
    generator, hits = np.random.default_rng(1), 0
    for _ in range(1000):
        documents = generator.normal(0, 1, size=20)
        seeds = generator.normal(0, 0.3, size=3)
        noise = generator.normal(0, 0.5, size=(3, 20))
        found = estimate([measured(documents + seed + own) for seed, own in zip(seeds, noise)])
        hits += found.low < 0 < found.high
    assert 930 <= hits <= 999


def test_means_weigh_documents():
    found = over_seeds([cell("raw-base-sft", seed, ce=[2.0, 3.0 + seed]) for seed in range(3)], "raw-base-sft", "ce")
    assert found.mean == pytest.approx((2.0 + 4.0) / 4) and found.count == 3
    assert found.half == pytest.approx(math.hypot(found.seeds, found.files)) and found.seeds > 0
    assert (found.low, found.high) == (found.mean - found.half, found.mean + found.half)


def test_differences_are_paired_by_seed_and_document():
    cells = [cell("raw-base-sft", seed, ce=[seed + 1.0, 9.0 * seed]) for seed in range(3)]
    cells += [cell("raw-base-ebft-centre", seed, ce=[seed + 0.5, 9.0 * seed - 1.5]) for seed in range(3)]
    found = difference(cells, "raw-base-ebft-centre", "raw-base-sft", "ce")
    assert (found.mean, found.seeds) == (-0.5, 0.0), "the seeds' own spread is no part of it"
    assert found.files == pytest.approx(0.0), "nor is that of documents"
    assert over_seeds(cells, "raw-base-sft", "ce").half > 1


def test_only_seeds_of_both_sides_count():
    cells = [cell("raw-base-sft", seed, ce=[1.0, 1.0]) for seed in (0, 1)]
    cells += [cell("raw-base-ebft-centre", seed, ce=[0.0, 0.0]) for seed in (1, 2)]
    found = difference(cells, "raw-base-ebft-centre", "raw-base-sft", "ce")
    assert found.count == 1 and math.isnan(found.half)


def test_a_start_is_the_other_side_of_every_seed():
    cells = [cell("raw-base-none", 0, ce=[4.0, 12.0])]
    cells += [cell("raw-base-sft", seed, ce=[3.0 + seed, 9.0 + 3 * seed]) for seed in (0, 1)]
    found = difference(cells, "raw-base-sft", "raw-base-none", "ce")
    assert (found.mean, found.count) == (-0.5, 2)


def test_a_start_has_an_interval_over_documents_alone():
    found = over_seeds([cell("raw-base-none", 0, ce=[4.0, 9.0])], "raw-base-none", "ce")
    assert found.seeds == 0.0 and found.half == found.files > 0


def test_missing_metrics_are_left_out():
    cells = [cell("raw-base-sft", 0, ce=[1.0, 1.0]), cell("raw-base-sft", 1)]
    assert over_seeds(cells, "raw-base-sft", "ce").count == 1
    assert over_seeds(cells, "raw-base-sft", "parses_greedy") is None


def test_different_documents_cannot_be_compared():
    cells = [cell("raw-base-sft", 0, ce=[1.0, 1.0]), cell("raw-base-ebft-centre", 0, (1.0,), ce=[1.0])]
    with pytest.raises(ValueError, match="zip"):
        difference(cells, "raw-base-ebft-centre", "raw-base-sft", "ce")
