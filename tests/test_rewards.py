"""Each formula against numbers worked out by hand, and the properties that the definitions promise."""

import itertools
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from ebft import rewards as ours

# Two samples and a reference in the plane: phi_1 = (1, 0), phi_2 = (0.6, 0.8), phi_ref = (0, 1).
SAMPLES = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
REFERENCE = torch.tensor([0.0, 1.0])


def random_features(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_unbiased_cfm_does_not_depend_on_the_number_of_samples():
    generator = torch.Generator().manual_seed(0)
    mean, reference = torch.tensor([0.5, -0.2, 0.1]), torch.tensor([0.1, 0.4, -0.3]).expand(200_000, 3)
    truth = (mean - reference[0]).square().sum().item()
    for n in (2, 4):
        samples = mean + torch.randn(200_000, n, 3, generator=generator)
        assert ours.unbiased_cfm_loss(samples, reference).mean() == pytest.approx(truth, abs=0.02)
        assert ours.cfm_loss(samples, reference).mean() == pytest.approx(truth + 3 / n, abs=0.02)


def test_whitened_samples_are_orthonormal_and_the_reference_follows():
    x, y = random_features(5, 2, 4, 9), random_features(5, 2, 9, seed=1)
    white_x, white_y = ours.whiten(x, y)
    torch.testing.assert_close(white_x @ white_x.mT, torch.eye(4).expand(5, 2, 4, 4), atol=1e-5, rtol=0)
    # W itself, D x D, in one group.
    u, s, vt = torch.linalg.svd(x[3, 1].double(), full_matrices=False)
    w = vt.T @ torch.diag(1 / s) @ vt
    torch.testing.assert_close(white_x[3, 1], (x[3, 1].double() @ w).float(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(white_y[3, 1], (y[3, 1].double() @ w).float(), atol=1e-5, rtol=1e-4)
    assert not any(white.any() for white in ours.whiten(torch.zeros(3, 5), torch.ones(5)))


def test_duplicates_are_dropped_not_amplified():
    x = random_features(4, 8)
    x[2] = x[0] * (1 + 1e-7)
    white_x, white_y = ours.whiten(x, random_features(8, seed=1))
    assert white_x.isfinite().all() and white_x.norm(dim=-1).max() <= 1 + 1e-4
    torch.testing.assert_close(white_x[0], white_x[2], atol=1e-4, rtol=0)
    assert (white_x[0] @ white_x[2]).item() == pytest.approx(0.5, abs=1e-4)  # duplicates share one direction
    same = x[:1].expand(4, -1)
    of_same = ours.diversity_rewards(ours.whiten(same, x[1])[0])
    torch.testing.assert_close(of_same, torch.full((4,), 0.5), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("function", "arguments", "match"), [
    (partial(ours.whiten, space="row"), (SAMPLES, REFERENCE), "space 'row'"),
    (ours.whiten, (SAMPLES * float("nan"), REFERENCE), "NaN"),
    (ours.whiten, (SAMPLES, torch.zeros(3)), "expected samples of shape"),
    (ours.whiten, (SAMPLES[:1], REFERENCE), "whitening .use_whitening. requires at least 2 samples"),
    (ours.compute_advantages, (torch.zeros(3), "ppo"), "invalid advantage_estimator 'ppo'"),
    (ours.compute_advantages, (torch.zeros(1), "rloo"), "at least 2 samples"),
    (ours.compute_advantages, (torch.zeros(1), "group_norm"), "at least 2 samples"),
    (partial(ours.compute_advantages, rloo_baseline="none"), (torch.zeros(3), "rloo"), "rloo_baseline"),
    (ours.unbiased_cfm_loss, (SAMPLES[:1], REFERENCE), "at least 2 samples"),
])  # fmt: skip
def test_what_is_refused(function, arguments, match):
    with pytest.raises(ValueError, match=match):
        function(*arguments)


@pytest.mark.parametrize("dtype, expected", [(torch.float32, 1e-5), (torch.bfloat16, 2**-6), (torch.float16, 2**-9)])
def test_whitening_drops_what_is_below_the_rounding_errors_of_the_features(dtype, expected):
    """Samples 1 and 2 differ by less than bfloat16 resolves: noise in that direction must not change the rewards."""
    assert ours.whitening_tolerance(dtype) == expected and ours.whitening_tolerance(dtype, "sample") == 1e-5
    settings = SimpleNamespace(use_whitening=True, whitening_space="feature", alignment_coef=1.0, diversity_coef=1.0)
    x, y = torch.nn.functional.normalize(random_features(4, 30), dim=-1), random_features(30, seed=1)
    x[1] = x[0] + 0.3 * expected * x[2]
    u, s, vt = torch.linalg.svd(x.double(), full_matrices=False)
    kept = s > expected * s[0]
    assert kept.sum() == 3
    white_x, white_y = u[:, kept] @ vt[kept], y.double() @ vt[kept].T @ torch.diag(1 / s[kept]) @ vt[kept]
    gram = white_x @ white_x.T
    wanted = 2 * torch.nn.functional.cosine_similarity(white_x, white_y[None]) - 2 / 3 * (gram.sum(1) - gram.diagonal())
    found = ours.match_features(x, y, settings, computed_in=dtype)
    torch.testing.assert_close(found.rewards.double(), wanted, atol=1e-4, rtol=1e-4)
    noise = 0.1 * expected * torch.nn.functional.normalize(random_features(4, 30, seed=2), dim=-1)
    torch.testing.assert_close(
        ours.match_features(x + noise, y, settings, computed_in=dtype).rewards, found.rewards, atol=0.1, rtol=0
    )


@pytest.mark.parametrize("whitens", [False, True])
def test_equal_samples_have_equal_terms_and_advantages_of_zero(whitens):
    tokens = torch.tensor([[[1, 2], [1, 2], [1, 2], [1, 2]], [[1, 2], [3, 2], [1, 2], [3, 2]]])
    first = ours.first_equal(tokens)
    assert first.tolist() == [[0, 0, 0, 0], [0, 1, 0, 1]]
    x = random_features(2, 4, 9).take_along_dim(first[..., None], 1) + 1e-6 * random_features(2, 4, 9, seed=3)
    settings = {"use_whitening": whitens, "whitening_space": "feature", "alignment_coef": 0.7, "diversity_coef": 0.3}
    match = ours.match_features(x, random_features(2, 9, seed=4), SimpleNamespace(**settings), first=first)
    for values in (match.alignment, match.diversity, match.rewards):
        assert torch.equal(values, values.gather(-1, first))
    for estimator, baseline in itertools.product(("rloo", "group_norm"), ("independent", "mean")):
        options = {"diversity": 0.3 * match.diversity, "rloo_baseline": baseline}
        found = ours.compute_advantages(match.rewards, estimator, **options)
        assert found[0].tolist() == [0.0] * 4 and (found[1].abs() > 1e-3).all()


def test_advantages_of_equal_rewards_are_zero_only_where_the_formula_gives_zero():
    rewards, equal, unequal = torch.full((3,), 0.1), torch.full((3,), 0.7), torch.tensor([0.5, 0.7, 0.9])
    assert ours.compute_advantages(rewards, "rloo").tolist() == [0.0] * 3
    assert ours.compute_advantages(rewards + 1e-8, "rloo", diversity=equal).tolist() == [0.0] * 3
    # Mean of the others' r + d is 0.9, 0.8, 0.7; diversity without j is 1.1, 0.7, 0.3.
    expected = torch.tensor([0.1 - 0.9 + 1.1, 0.1 - 0.8 + 0.7, 0.1 - 0.7 + 0.3])
    torch.testing.assert_close(ours.compute_advantages(rewards, "rloo", diversity=unequal), expected)
    # Both of two equal samples are penalised for each other.
    penalised = ours.compute_advantages(rewards[:2], "rloo", diversity=equal[:2])
    torch.testing.assert_close(penalised, torch.full((2,), -0.7))
    for reward in torch.linspace(4, 20, 50):  # whose mean in float32 can differ by a unit in the last place
        assert ours.compute_advantages(reward.expand(8), "group_norm").tolist() == [0.0] * 8
    far = torch.tensor([1000.0, 1000.0, 1000.01])
    assert (ours.compute_advantages(far, "rloo").abs() > 1e-3).all()
    assert ours.diversity_rewards(SAMPLES[:1]).tolist() == [0.0]


def test_policy_gradient_of_the_reward_is_the_gradient_of_the_feature_matching_loss():
    """Enumerated over three samples, with both scales of baselines: RLOO on eq. 7 ascends minus ||E phi - ref||^2."""
    phi, ref = random_features(3, 4), random_features(4, seed=3)
    logits = torch.tensor([0.3, -0.4, 0.2], requires_grad=True)
    p = logits.softmax(-1)
    (target,) = torch.autograd.grad(-(p @ phi - ref).square().sum(), logits)
    for n in (2, 3):
        total = torch.zeros(3)
        for index in torch.cartesian_prod(*[torch.arange(3)] * n):
            x = phi[index]
            d = ours.diversity_rewards(x)
            advantages = ours.compute_advantages(2 * x @ ref - d, "rloo", diversity=d)
            logp = logits.log_softmax(-1)[index]
            (gradient,) = torch.autograd.grad((advantages * logp).mean(), logits)
            total += math.prod(p[index].tolist()) * gradient
        torch.testing.assert_close(total, target, atol=1e-5, rtol=1e-4)
