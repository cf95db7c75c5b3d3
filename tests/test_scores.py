"""Scores per document: best of k by enumeration, means as ratios of sums, paired bootstrap over documents."""

import itertools
import math

import numpy as np
import pytest
import torch

from ebft.rewards import alignment_rewards, diversity_rewards
from ebft.scores import Scores, best_of, feature_scores, interval, small_sample_factor


def embeddings(groups=3, samples=4, size=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    phi = torch.nn.functional.normalize(torch.randn(groups, samples + 1, size, generator=generator), dim=-1)
    return phi[:, :-1], phi[:, -1]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_best_of_is_the_mean_over_all_subsets(k):
    values = [[0.3, -1.0, 2.0, 0.3, 0.7], [1.0, 1.0, 0.0, 0.0, 0.0]]
    expected = [sum(max(subset) for subset in itertools.combinations(row, k)) / math.comb(5, k) for row in values]
    assert best_of(torch.tensor(values), k).tolist() == pytest.approx(expected)


def test_feature_scores_by_hand():
    phi, phi_ref = embeddings()
    found = feature_scores(phi, phi_ref, alignment_coef=0.5, diversity_coef=2.0, pass_at=[1, 4])
    for m in range(3):
        x, y = phi[m], phi_ref[m]
        pairs = [x[j] @ x[k] for j in range(4) for k in range(4) if j != k]
        assert found["cfm_loss"][m].item() == pytest.approx(float(1 - 2 * (x @ y).mean() + sum(pairs) / 12), abs=1e-5)
        assert found["cfm_loss_plugin"][m].item() == pytest.approx((x.mean(0) - y).square().sum().item(), abs=1e-6)
        alignment = 2 * x @ y
        diversity = torch.stack([2 / 3 * sum(x[j] @ x[k] for k in range(4) if k != j) for j in range(4)])
        assert found["alignment_pass@1"][m].item() == pytest.approx(alignment.mean().item(), abs=1e-6)
        assert found["alignment_pass@4"][m].item() == pytest.approx(alignment.max().item(), abs=1e-6)
        reward = 0.5 * alignment - 2 * diversity
        assert found["reward_pass@1"][m].item() == pytest.approx(reward.mean().item(), abs=1e-5)
        assert found["reward_pass@4"][m].item() == pytest.approx(reward.max().item(), abs=1e-5)
    assert torch.equal(found["alignment"], alignment_rewards(phi, phi_ref).mean(-1))
    assert torch.equal(found["diversity"], diversity_rewards(phi).mean(-1))


def scores_of(values):
    """values: name -> {document: (total, weight)}"""
    scores = Scores()
    for name, entries in values.items():
        scores.add(name, list(entries), *zip(*entries.values()))
    return scores


def test_means_are_ratios_of_sums():
    scores = scores_of({"ce_loss": {1: (6.0, 3.0), 2: (1.0, 1.0)}, "odd": {1: (0.0, 0.0)}})
    scores.add("ce_loss", [2, 2], torch.tensor([2.0, 3.0]))
    assert scores.means() == pytest.approx({"ce_loss": 12 / 6, "perplexity": math.exp(2)})


def test_documents_are_drawn_whole():
    """Blocks of one document are no independent evidence: a draw of documents sees all of them or none."""
    values = np.random.default_rng(0).normal(size=40)
    scores = Scores()
    for document, value in enumerate(values):
        scores.add("alignment", [document] * 25, [value] * 25)
    low, high = interval(scores.resampled(range(40), 4000)["alignment"], 0.95)
    width = 2 * 1.96 * values.std() / math.sqrt(40)
    assert high - low == pytest.approx(width * 2.0227 / 1.96 * math.sqrt(40 / 39), rel=0.08)
    assert low < values.mean() < high


def test_draws_of_two_models_are_paired():
    first = scores_of({"ce_loss": {d: (float(d), 1.0) for d in range(30)}})
    second = scores_of({"ce_loss": {d: (d + 0.5, 1.0) for d in range(30)}})
    differences = second.resampled(range(30), 500, 3)["ce_loss"] - first.resampled(range(30), 500, 3)["ce_loss"]
    assert differences == pytest.approx(0.5)
    assert not np.allclose(first.resampled(range(30), 500, 3)["ce_loss"], first.resampled(range(30), 500, 4)["ce_loss"])


def test_a_metric_that_applies_to_few_documents():
    two = {3: (1.0, 1.0), 5: (1.0, 1.0)}
    scores = scores_of({"ce_loss": {d: (1.0, 1.0) for d in range(8)}, "passes": two, "one": {3: (1.0, 1.0)}})
    draws = scores.resampled(range(8), 300)["passes"]
    assert np.isnan(draws).any() and interval(draws, 0.95) == [1.0, 1.0]
    assert interval(scores.resampled(range(8), 300)["one"], 0.95) is None  # nothing is known of other documents
    assert interval(np.full(3, np.nan), 0.95) is None


@pytest.mark.parametrize(("documents", "confidence", "t", "z"), [  # quantiles of Student's t and the normal, of tables
    (4, 0.95, 3.182, 1.95996), (8, 0.95, 2.365, 1.95996), (20, 0.95, 2.093, 1.95996), (8, 0.9, 1.895, 1.64485),
])  # fmt: skip
def test_the_factor_for_few_documents_is_that_of_students_t(documents, confidence, t, z):
    wanted = t / z * math.sqrt(documents / (documents - 1))
    assert small_sample_factor(np.full(documents, 3.0), confidence) == pytest.approx(wanted, rel=1e-2)
    of_unequal = small_sample_factor(np.array([1.0] * (documents - 1) + [5.0]), confidence)
    assert of_unequal > wanted and small_sample_factor(np.ones(100_000), confidence) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(("count", "spread"), [(8, 0.7), (20, 0.0)])
def test_intervals_cover_the_mean_as_often_as_they_say(count, spread):
    """Documents of unequal length whose tokens have a mean of 0, with a mean of their own around it."""
    rng, hits, plain, trials = np.random.default_rng(0), 0, 0, 400
    for trial in range(trials):
        lengths = np.ceil(100 * np.exp(spread * rng.normal(size=count)))
        sums = lengths * 0.3 * rng.normal(size=count) + np.sqrt(lengths) * rng.normal(size=count)
        scores = scores_of({"ce_loss": {d: (sums[d], lengths[d]) for d in range(count)}})
        draws = scores.resampled(range(count), 300, trial)["ce_loss"]
        low, high = interval(draws, 0.95)
        hits += low <= 0 <= high
        mean, factor = sums.sum() / lengths.sum(), small_sample_factor(lengths, 0.95)
        plain += abs(mean) <= max(mean - low, high - mean) / factor
    assert hits / trials == pytest.approx(0.955, abs=0.025)
    assert plain / trials < 0.935
