"""Held-out scores of a batch of groups.

N  samples of a group, M  groups
"""

from __future__ import annotations

from torch import Tensor

from ebft.config.options import RewardOptions
from ebft.rewards import FeatureMatch
from ebft.scores import feature_scores


def held_out_values(match: FeatureMatch, options: RewardOptions) -> dict[str, Tensor]:
    """Feature matching of every group, repeated for its samples (M * N,), in the one space that models compare in:

    normalised and unwhitened, as in strided mode (`ebft.scores.feature_scores`).
    """
    n = match.samples.shape[1]
    values = feature_scores(
        match.samples,
        match.reference,
        alignment_coef=options.alignment_coef,
        diversity_coef=options.diversity_coef,
        pass_at=sorted({1, n}),
    )
    return {name: value.repeat_interleave(n) for name, value in values.items()}
