"""Whitening, rewards, feature-matching losses and advantages: pure functions on tensors, one per formula.

Equation numbers are those of Jelassi et al. 2026 (arXiv 2603.12248). Shapes, in every function:

    ...  any leading dimensions (documents, blocks, prompt groups)
    N    samples of one group, D  feature dimension
    samples   (..., N, D)   embeddings of the rollouts, samples on dimension -2
    reference (..., D)      embedding of the reference, or (..., N, D) where each sample has its own
    rewards   (..., N)      anything that has one number per sample
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

WhiteningSpace = Literal["feature", "sample"]
AdvantageEstimator = Literal["rloo", "group_norm", "reinforce"]
RlooBaseline = Literal["independent", "mean"]

# Rewards closer together than this are equal up to rounding; dividing by their spread would amplify noise.
_MIN_REWARD_STD = 1e-6


class RewardSettings(Protocol):
    """The options of a reward, as both trainers' arguments and the section `ebft:` have them."""

    use_whitening: bool
    whitening_space: WhiteningSpace
    alignment_coef: float
    diversity_coef: float


@dataclass(frozen=True)
class FeatureMatch:
    """How samples match their references: the embeddings as given, and the terms in the space of the reward."""

    samples: Tensor  # (..., N, D), not whitened
    reference: Tensor  # (..., D), not whitened
    alignment: Tensor  # (..., N)
    diversity: Tensor  # (..., N)
    rewards: Tensor  # (..., N)
    cfm: Tensor  # (...)


@torch.no_grad()
def match_features(samples: Tensor, reference: Tensor, settings: RewardSettings) -> FeatureMatch:
    """Rewards `alignment_coef * alignment - diversity_coef * diversity` (eq. 6-7), whitened where asked for.

    Samples are (..., N, D), the reference (..., D). Nothing here has a gradient: rewards are constants to the policy.
    """
    phi, phi_ref = samples, reference
    if settings.use_whitening:
        phi, phi_ref = whiten(phi, phi_ref, settings.whitening_space)
    alignment, diversity = alignment_rewards(phi, phi_ref), diversity_rewards(phi)
    rewards = settings.alignment_coef * alignment - settings.diversity_coef * diversity
    return FeatureMatch(samples, reference, alignment, diversity, rewards, cfm_loss(phi, phi_ref))


def whiten(
    samples: Tensor, reference: Tensor, space: WhiteningSpace = "feature", tol: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Whiten samples (..., N, D) and reference (..., D) by the samples' own second moment (eq. 8-9, section 2.3).

    With X = U S V^T the N x D matrix of samples and singular values below `tol * S_max` dropped:

    - `"feature"` applies `W = V S^+ V^T` from the right to both, so distinct samples become orthonormal.
    - `"sample"` applies `(X X^T)^(-1/2)` from the left to both, as the paper's authors released it; the
      reference is repeated once per sample first and comes back as (..., N, D).

    Nothing of size D x D is formed: both maps act inside the span of the N samples and follow from the
    eigenvectors of the N x N Gram matrix, which is taken in float64 so that `tol**2` stays far above rounding.
    """
    _check_pair(samples, reference)
    if space not in ("feature", "sample"):
        raise ValueError(f"whitening space {space!r} is unknown: use 'feature' or 'sample'")
    x_ND, y_D = samples.double(), reference.double()
    gram_NN = x_ND @ x_ND.mT
    if not torch.isfinite(gram_NN).all():
        raise ValueError("cannot whiten embeddings that hold NaN or infinity")
    eigenvalue_N, u_NN = torch.linalg.eigh(gram_NN)  # squared singular values, ascending
    kept_N = eigenvalue_N > (tol**2) * eigenvalue_N[..., -1:].clamp_min(torch.finfo(torch.float64).tiny)
    inverse_s_N = torch.where(kept_N, eigenvalue_N.clamp_min(0).rsqrt(), 0.0)  # diagonal of S^+
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
    """`2 cos(phi_j, phi_ref)` (eq. 7; a cosine also after whitening): (..., N)."""
    _check_pair(samples, reference)
    return 2.0 * F.cosine_similarity(samples, _per_sample(samples, reference), dim=-1)


def diversity_rewards(samples: Tensor) -> Tensor:
    """`2/(N-1) sum_{k != j} <phi_j, phi_k>` (eq. 7), to be subtracted from the reward: (..., N); 0 for N = 1."""
    n = samples.shape[-2]
    if n == 1:
        return samples.new_zeros(samples.shape[:-1])
    gram_NN = samples @ samples.mT
    return 2.0 / (n - 1) * (gram_NN.sum(-1) - gram_NN.diagonal(dim1=-2, dim2=-1))


def cfm_loss(samples: Tensor, reference: Tensor) -> Tensor:
    """Conditional feature-matching loss `||mean_j phi_j - phi_ref||^2` (eq. 2), the plug-in value: (...)."""
    _check_pair(samples, reference)
    return (samples - _per_sample(samples, reference)).mean(-2).square().sum(-1)


def unbiased_cfm_loss(samples: Tensor, reference: Tensor) -> Tensor:
    """`<r, r> - 2 mean_j <phi_j, r> + mean_{j != k} <phi_j, phi_k>`, an unbiased estimate of eq. 2: (...).

    The plug-in value exceeds it by the samples' variance over N. Needs N >= 2.
    """
    _check_pair(samples, reference)
    if samples.shape[-2] < 2:
        raise ValueError("the unbiased feature-matching loss needs at least two samples per group")
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
    """Advantages of the N samples of each group from their rewards: (..., N) -> (..., N).

    `rloo` (appendix E) subtracts a leave-one-out baseline. Given the `diversity` part that `rewards` already
    contains with a minus sign (its coefficient applied, (..., N)), the default baseline leaves out every term
    that touches sample j, also those inside the other samples' diversity: the mean of the others' alignment part less
    `(sum_k d_k - 2 d_j) / (N - 2)`, or less 0 for N = 2. `rloo_baseline="mean"`, or no
    `diversity`, is the literal mean over the other rewards. `group_norm` is `(r - mean) / std`, with the
    N - 1 standard deviation, and 0 where all rewards are equal. `reinforce` is the reward itself.

    Raises ValueError for an unknown estimator, and for `rloo` or `group_norm` with one sample.
    """
    n = rewards.shape[-1]
    if estimator not in ("rloo", "group_norm", "reinforce"):
        raise ValueError(f"advantage_estimator {estimator!r} is unknown: use 'rloo', 'group_norm' or 'reinforce'")
    if rloo_baseline not in ("independent", "mean"):
        raise ValueError(f"rloo_baseline {rloo_baseline!r} is unknown: use 'independent' or 'mean'")
    if estimator == "reinforce":
        return rewards.clone()
    if n < 2:
        raise ValueError(f"advantage_estimator {estimator!r} needs at least 2 samples per group, got {n}")
    if estimator == "group_norm":
        std = rewards.std(-1, keepdim=True)
        centred = rewards - rewards.mean(-1, keepdim=True)
        return torch.where(std > _MIN_REWARD_STD, centred / std.clamp_min(_MIN_REWARD_STD), 0.0)
    if diversity is None or rloo_baseline == "mean":
        return rewards - _mean_of_others(rewards)
    return rewards - _mean_of_others(rewards + diversity) + _diversity_without(diversity)


def _mean_of_others(values: Tensor) -> Tensor:
    """Mean over the other samples of the group: (..., N)."""
    return (values.sum(-1, keepdim=True) - values) / (values.shape[-1] - 1)


def _diversity_without(diversity: Tensor) -> Tensor:
    """Mean diversity of the other samples among themselves, with no term that touches sample j: (..., N).

    Every inner product <phi_j, phi_k> stands once in d_j and once in d_k, so the sum over all d less 2 d_j
    holds exactly the pairs without j.
    """
    n = diversity.shape[-1]
    if n == 2:
        return torch.zeros_like(diversity)
    return (diversity.sum(-1, keepdim=True) - 2.0 * diversity) / (n - 2)


def _per_sample(samples: Tensor, reference: Tensor) -> Tensor:
    """The reference with a sample dimension that broadcasts against (..., N, D)."""
    return reference.unsqueeze(-2) if reference.dim() == samples.dim() - 1 else reference


def _check_pair(samples: Tensor, reference: Tensor) -> None:
    shared = reference.shape == samples.shape[:-2] + samples.shape[-1:]
    if samples.dim() < 2 or not (shared or reference.shape == samples.shape):
        raise ValueError(
            f"samples {tuple(samples.shape)} and reference {tuple(reference.shape)} do not fit: "
            "expected samples (..., N, D) with reference (..., D)"
        )
