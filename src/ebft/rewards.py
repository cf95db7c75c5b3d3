"""Whitening, rewards, feature-matching losses and advantages: pure functions on tensors, one per formula.

Equation numbers refer to Jelassi et al. 2026 (arXiv 2603.12248). Shapes, in every function:

    ...  any leading dimensions (documents, blocks, prompt groups)
    N    samples of one group, D  feature dimension
    samples   (..., N, D)   embeddings of the rollouts, with samples on dimension -2
    reference (..., D)      embedding of the reference, or (..., N, D) with a separate reference per sample
    rewards   (..., N)      one value per sample
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

WhiteningSpace = Literal["feature", "sample"]
AdvantageEstimator = Literal["rloo", "group_norm", "reinforce"]
RlooBaseline = Literal["independent", "mean"]

# Rewards with a smaller standard deviation are equal up to rounding; dividing by it would amplify noise.
_MIN_REWARD_STD = 1e-6
# Singular values below this fraction of the largest are dropped in whitening, with embeddings computed in float32.
_MIN_SINGULAR_VALUE = 1e-5
# In whitening, the check of embeddings and the decomposition each wait for a GPU, but only once together if they are on
# CPU, where the decomposition of up to 8 x 8 values takes about 10 microseconds.
_MOST_SAMPLES_ON_CPU = 8


class RewardSettings(Protocol):
    """The options of the reward, which are part of both trainers' arguments and of the section `ebft:`."""

    use_whitening: bool
    whitening_space: WhiteningSpace
    alignment_coef: float
    diversity_coef: float


@dataclass(frozen=True)
class FeatureMatch:
    """The result of matching samples with references: the input embeddings, and the terms in the reward's space."""

    samples: Tensor  # (..., N, D), not whitened
    reference: Tensor  # (..., D), not whitened
    alignment: Tensor  # (..., N)
    diversity: Tensor  # (..., N)
    rewards: Tensor  # (..., N)
    cfm: Tensor  # (...)


@torch.no_grad()
def match_features(
    samples: Tensor,
    reference: Tensor,
    settings: RewardSettings,
    *,
    computed_in: torch.dtype = torch.float32,
    first: Tensor | None = None,
) -> FeatureMatch:
    """Compute the rewards `alignment_coef * alignment - diversity_coef * diversity` (eq. 6-7) and their terms.

    samples (..., N, D), reference (..., D); whitened if `settings.use_whitening`, with the tolerance for embeddings
    that were computed in the dtype `computed_in`. `first` (..., N), a result of `first_equal`, gives equal samples
    exactly equal terms. No gradients are computed, since rewards are constants with respect to the policy.
    """
    if first is not None:
        samples = samples.gather(-2, first.unsqueeze(-1).expand_as(samples))
    phi, phi_ref = samples, reference
    if settings.use_whitening:
        tol = whitening_tolerance(computed_in, settings.whitening_space)
        phi, phi_ref = whiten(phi, phi_ref, settings.whitening_space, tol)
    alignment, diversity = alignment_rewards(phi, phi_ref), diversity_rewards(phi)
    if first is not None:
        alignment, diversity = alignment.gather(-1, first), diversity.gather(-1, first)
    rewards = settings.alignment_coef * alignment - settings.diversity_coef * diversity
    return FeatureMatch(samples, reference, alignment, diversity, rewards, cfm_loss(phi, phi_ref))


def first_equal(tokens: Tensor) -> Tensor:
    """Return the index of the first sample of each group with the same tokens: (..., N, G) -> (..., N)."""
    is_equal_NN = (tokens.unsqueeze(-2) == tokens.unsqueeze(-3)).all(-1)
    return is_equal_NN.int().argmax(-1)  # the first of equal values


def whitening_tolerance(computed_in: torch.dtype, space: WhiteningSpace = "feature") -> float:
    """Return the tolerance of `whiten` for embeddings computed in a dtype.

    The rounding errors of the N embeddings are a matrix whose largest singular value is about `eps` times the
    embeddings', and below `2 * eps` in 90% of groups. Smaller singular values of the embeddings are rounding noise,
    which feature-space whitening would scale up to the length of the others; sample-space whitening does not apply
    them to the reference.
    """
    return max(_MIN_SINGULAR_VALUE, 2 * torch.finfo(computed_in).eps) if space == "feature" else _MIN_SINGULAR_VALUE


def whiten(
    samples: Tensor, reference: Tensor, space: WhiteningSpace = "feature", tol: float = _MIN_SINGULAR_VALUE
) -> tuple[Tensor, Tensor]:
    """Whiten samples (..., N, D) and reference (..., D) with the samples' second moment (eq. 8-9, section 2.3).

    Let X = U S V^T be the N x D matrix of samples, with singular values below `tol * S_max` dropped.

    - `"feature"` multiplies both by `W = V S^+ V^T` from the right, so that distinct samples become orthonormal.
    - `"sample"` multiplies both by `(X X^T)^(-1/2)` from the left, as in the code released by the paper's authors. The
      reference is first repeated for each sample and returned as (..., N, D).

    No D x D matrix is formed: both maps act within the span of the N samples and are computed from the eigenvectors of
    the N x N Gram matrix, in float64, so that `tol**2` is far above the rounding error. Raises ValueError for an
    unknown `space`, for a single sample, whose cosine with any reference would be 1 or -1, and for NaN or infinite
    embeddings.
    """
    _check_pair(samples, reference)
    _check_choice("whitening space", space, WhiteningSpace)
    _check_samples(samples.shape[-2], "whitening (use_whitening)")
    x_ND, y_D = samples.double(), reference.double()
    gram_NN = x_ND @ x_ND.mT
    if samples.shape[-2] <= _MOST_SAMPLES_ON_CPU:
        gram_NN = gram_NN.cpu()
    if not torch.isfinite(gram_NN).all():
        raise ValueError("cannot whiten embeddings that contain NaN or infinity")
    eigenvalue_N, u_NN = torch.linalg.eigh(gram_NN)  # squared singular values, ascending
    kept_N = eigenvalue_N > (tol**2) * eigenvalue_N[..., -1:].clamp_min(torch.finfo(torch.float64).tiny)
    inverse_s_N = torch.where(kept_N, eigenvalue_N.clamp_min(0).rsqrt(), 0.0)  # diagonal of S^+
    both = torch.cat([u_NN, inverse_s_N.unsqueeze(-2)], -2).to(samples.device, non_blocking=True)
    u_NN, inverse_s_N = both[..., :-1, :], both[..., -1, :]
    inverse_root_NN = (u_NN * inverse_s_N.unsqueeze(-2)) @ u_NN.mT  # (X X^T)^(-1/2)
    white_samples_ND = inverse_root_NN @ x_ND  # U S^+ U^T X = X W = U V^T: the two maps agree on X itself
    if space == "sample":
        white_reference = inverse_root_NN.sum(-1, keepdim=True) * y_D.unsqueeze(-2)
    else:
        # y W = y V S^+ V^T with V = X^T U S^+, hence X^T U S^(+3) U^T (X y).
        inner_N = (u_NN.mT @ (x_ND @ y_D.unsqueeze(-1))).squeeze(-1)
        weight_N1 = u_NN @ (inverse_s_N**3 * inner_N).unsqueeze(-1)
        white_reference = (x_ND.mT @ weight_N1).squeeze(-1)
    return white_samples_ND.to(samples.dtype), white_reference.to(reference.dtype)


def alignment_rewards(samples: Tensor, reference: Tensor) -> Tensor:
    """Return `2 cos(phi_j, phi_ref)` (eq. 7; the cosine is also used after whitening): (..., N)."""
    _check_pair(samples, reference)
    return 2.0 * F.cosine_similarity(samples, _per_sample(samples, reference), dim=-1)


def diversity_rewards(samples: Tensor) -> Tensor:
    """Return `2/(N-1) sum_{k != j} <phi_j, phi_k>` (eq. 7), which is subtracted from the reward: (..., N).

    0 for N = 1.
    """
    n = samples.shape[-2]
    if n == 1:
        return samples.new_zeros(samples.shape[:-1])
    gram_NN = samples @ samples.mT
    return 2.0 / (n - 1) * (gram_NN.sum(-1) - gram_NN.diagonal(dim1=-2, dim2=-1))


def cfm_loss(samples: Tensor, reference: Tensor) -> Tensor:
    """Return the conditional feature-matching loss `||mean_j phi_j - phi_ref||^2` (eq. 2), plug-in estimate: (...)."""
    _check_pair(samples, reference)
    return (samples - _per_sample(samples, reference)).mean(-2).square().sum(-1)


def unbiased_cfm_loss(samples: Tensor, reference: Tensor) -> Tensor:
    """Return `<r, r> - 2 mean_j <phi_j, r> + mean_{j != k} <phi_j, phi_k>`, an unbiased estimate of eq. 2: (...).

    The plug-in estimate exceeds it by the variance of the samples divided by N. Raises ValueError for N < 2.
    """
    _check_pair(samples, reference)
    _check_samples(samples.shape[-2], "the unbiased feature-matching loss")
    reference_ND = _per_sample(samples, reference)
    cross = (samples * reference_ND).sum(-1).mean(-1)
    return reference_ND.square().sum(-1).mean(-1) - 2.0 * cross + diversity_rewards(samples).mean(-1) / 2.0


def compute_advantages(
    rewards: Tensor,
    estimator: AdvantageEstimator = "rloo",
    *,
    diversity: Tensor | None = None,
    rloo_baseline: RlooBaseline = "independent",
) -> Tensor:
    """Compute the advantages of the N samples of each group from their rewards: (..., N) -> (..., N).

    `rloo` (appendix E) subtracts a leave-one-out baseline. `diversity` (..., N) is the diversity term, multiplied by
    its coefficient, that `rewards` already contains with a minus sign. If it is given, the default baseline excludes
    all terms that depend on sample j, including those in the other samples' diversity: it is the mean of the other
    samples' alignment terms minus `(sum_k d_k - 2 d_j) / (N - 2)`, or minus 0 for N = 2. With `rloo_baseline="mean"`,
    or without `diversity`, it is the mean of the other samples' rewards. `group_norm` is `(r - mean) / std`, with the
    N - 1 standard deviation. `reinforce` is the reward itself.

    Advantages of `rloo` and `group_norm` are exactly 0 where the formula gives 0 because all rewards (and diversity
    terms) of a group are equal; their rounding errors would be scaled up by Adam. With the default baseline and N = 2,
    the advantages of equal samples are `-d_j`, which makes both less likely.

    Raises ValueError for an unknown estimator or baseline, and for `rloo` or `group_norm` with a single sample.
    """
    n = rewards.shape[-1]
    _check_choice("advantage_estimator", estimator, AdvantageEstimator)
    _check_choice("rloo_baseline", rloo_baseline, RlooBaseline)
    if estimator == "reinforce":
        return rewards.clone()
    _check_samples(n, f"advantage_estimator {estimator!r}")
    if estimator == "group_norm":
        std = rewards.std(-1, keepdim=True)
        centred = rewards - rewards.mean(-1, keepdim=True)
        advantages = torch.where(std > _MIN_REWARD_STD, centred / std.clamp_min(_MIN_REWARD_STD), 0.0)
        return advantages.masked_fill(_are_equal(rewards, diversity), 0.0)
    if diversity is None or rloo_baseline == "mean":
        return (rewards - _mean_of_others(rewards)).masked_fill(_are_equal(rewards, diversity), 0.0)
    are_zero = _are_equal(rewards, diversity) & _are_equal(diversity, rewards)
    if n == 2:
        are_zero &= (diversity == 0).all(-1, keepdim=True)
    advantages = rewards - _mean_of_others(rewards + diversity) + _diversity_without(diversity)
    return advantages.masked_fill(are_zero, 0.0)


def _are_equal(values: Tensor, others: Tensor | None) -> Tensor:
    """Return which groups of `values` (..., N), from terms of the size of both, are equal up to rounding: (..., 1)."""
    terms = values if others is None else torch.cat([values, others], dim=-1)
    rounding = 4 * torch.finfo(values.dtype).eps * terms.abs().amax(-1, keepdim=True)
    return values.amax(-1, keepdim=True) - values.amin(-1, keepdim=True) <= rounding


def _mean_of_others(values: Tensor) -> Tensor:
    """Return the mean over the other samples of the group: (..., N)."""
    return (values.sum(-1, keepdim=True) - values) / (values.shape[-1] - 1)


def _diversity_without(diversity: Tensor) -> Tensor:
    """Return the mean diversity among the other samples, without terms that depend on sample j: (..., N).

    Every inner product <phi_j, phi_k> occurs once in d_j and once in d_k, so the sum over all d minus 2 d_j contains
    exactly the pairs without j.
    """
    n = diversity.shape[-1]
    if n == 2:
        return torch.zeros_like(diversity)
    return (diversity.sum(-1, keepdim=True) - 2.0 * diversity) / (n - 2)


def _per_sample(samples: Tensor, reference: Tensor) -> Tensor:
    """Return the reference with a sample dimension that broadcasts to (..., N, D)."""
    return reference.unsqueeze(-2) if reference.dim() == samples.dim() - 1 else reference


def _check_choice(name: str, given: str, choices: Any) -> None:
    if given not in get_args(choices):
        raise ValueError(f"invalid {name} {given!r}; expected {' or '.join(map(repr, get_args(choices)))}")


def _check_samples(count: int, what: str) -> None:
    if count < 2:
        raise ValueError(f"{what} requires at least 2 samples per group, got {count}")


def _check_pair(samples: Tensor, reference: Tensor) -> None:
    shared = reference.shape == samples.shape[:-2] + samples.shape[-1:]
    if samples.dim() < 2 or not (shared or reference.shape == samples.shape):
        raise ValueError(
            f"expected samples of shape (..., N, D) and a reference of shape (..., D), got samples "
            f"{tuple(samples.shape)} and reference {tuple(reference.shape)}"
        )
