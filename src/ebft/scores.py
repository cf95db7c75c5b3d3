"""Held-out scores: sums of every metric per document, their means, and bootstrap intervals over documents.

M  groups of samples   N  samples of a group   D  documents   R  resamples
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ebft.errors import NonFiniteLossError
from ebft.rewards import alignment_rewards, cfm_loss, diversity_rewards, unbiased_cfm_loss, whiten, whitening_tolerance

CROSS_ENTROPY = {"perplexity": "ce_loss", "perplexity_all": "ce_loss_all"}
CURVE = "curve"  # prefix of the names of points of curves: curve/NAME/POSITION
_MAX_EXPONENT = 700.0  # exp() of larger float64 values overflows


def feature_scores(
    phi: Tensor,
    phi_ref: Tensor,
    alignment_coef: float,
    diversity_coef: float,
    *,
    pass_at: Iterable[int],
    computed_in: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Compute the feature-matching metrics of groups (M, N, D') and references (M, D'), by name: (M,) each.

    Embeddings are normalised but not whitened, so that different models are comparable; only `cfm_loss_whitened`
    whitens each group with its own samples, with the tolerance of the dtype `computed_in`. `cfm_loss` is the unbiased
    estimate and is omitted for N = 1. `X_pass@k` is the expected maximum over k samples. Raises NonFiniteLossError
    for NaN or infinite embeddings.
    """
    if not (torch.isfinite(phi).all() & torch.isfinite(phi_ref).all()):
        raise NonFiniteLossError("The feature network returned NaN for held-out text. Load it in bfloat16 or float32.")
    alignment, diversity = alignment_rewards(phi, phi_ref), diversity_rewards(phi)
    reward = alignment_coef * alignment - diversity_coef * diversity
    values = {
        "alignment": alignment.mean(-1),
        "diversity": diversity.mean(-1),
        "cfm_loss_plugin": cfm_loss(phi, phi_ref),
        "cfm_loss_whitened": cfm_loss(*whiten(phi, phi_ref, tol=whitening_tolerance(computed_in))),
    }
    if phi.shape[1] > 1:
        values["cfm_loss"] = unbiased_cfm_loss(phi, phi_ref)
    for k in pass_at:
        values[f"alignment_pass@{k}"] = best_of(alignment, k)
        values[f"reward_pass@{k}"] = best_of(reward, k)
    return values


def feature_score_names(num_samples: int, pass_at: Iterable[int]) -> list[str]:
    """Return the names of the metrics of `feature_scores` for groups of `num_samples`."""
    phi = torch.eye(num_samples, num_samples + 1)[None]
    return list(feature_scores(phi, phi[:, 0], alignment_coef=1.0, diversity_coef=1.0, pass_at=pass_at))


def best_of(values: Tensor, k: int) -> Tensor:
    """Return the expected maximum of k of the N values (..., N), drawn without replacement: (...).

    For values of 0 and 1, this is the usual unbiased pass@k, `1 - C(N - c, k) / C(N, k)`; for k = 1 the mean, for
    k = N the maximum. k is from 1 to N.
    """
    n = values.shape[-1]
    ways = torch.tensor([math.comb(rank, k - 1) / math.comb(n, k) for rank in range(n)], dtype=torch.float64)
    return (values.double().sort(-1).values * ways.to(values.device)).sum(-1).to(values.dtype)


def perplexities(means: Mapping[str, float]) -> dict[str, float]:
    """Return the perplexity of each mean cross-entropy."""
    return {name: math.exp(min(means[ce], _MAX_EXPONENT)) for name, ce in CROSS_ENTROPY.items() if ce in means}


def curve_lengths(longest: int) -> list[int]:
    """Return the completion lengths at which a curve has points: the powers of two below `longest`, and `longest`."""
    return [*(2**i for i in range(longest.bit_length()) if 2**i < longest), longest]


@dataclass
class Scores:
    """Sums and weights of every metric for every document; a metric's mean is the ratio of its two sums.

    The bootstrap resamples documents, so the blocks, samples and tokens of a document stay together.
    """

    sums: dict[str, dict[int, list[float]]] = field(default_factory=lambda: defaultdict(dict))
    samples: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # for histograms

    def add(self, name: str, documents: Iterable[int], totals: Any, weights: Any = None) -> None:
        """Add one value of `totals` for each of `documents`, each a sum over `weights` items (None: one item).

        Raises NonFiniteLossError for NaN or infinite values.
        """
        totals = _numbers(totals)
        weights = np.ones_like(totals) if weights is None else _numbers(weights)
        if not np.isfinite(totals).all():
            raise NonFiniteLossError(f"{name} is not finite on held-out text. Load the model in bfloat16 or float32.")
        entries = self.sums[name]
        for document, total, weight in zip(documents, totals, weights, strict=True):
            entry = entries.setdefault(int(document), [0.0, 0.0])
            entry[0] += total
            entry[1] += weight

    def add_all(self, values: Mapping[str, Tensor], documents: Iterable[int]) -> None:
        """Add values (M,) by name; `documents` contains the document of each value."""
        documents = list(documents)
        for name, value in zip(values, torch.stack(list(values.values())).cpu()):  # in one wait for their device
            self.add(name, documents, value)

    def divide(self, document: int, copies: int) -> None:
        """Divide the sums and weights of a document, which `copies` ranks add."""
        for entries in self.sums.values():
            entries[document] = [number / copies for number in entries.get(document, (0.0, 0.0))]

    def keep_samples(self, phi: Tensor, phi_ref: Tensor, alignment_coef: float, diversity_coef: float) -> None:
        """Keep the alignment and reward of every sample of groups (M, N, D'), for histograms."""
        alignment = alignment_rewards(phi, phi_ref)
        reward = alignment_coef * alignment - diversity_coef * diversity_rewards(phi)
        self.samples["alignment"] += alignment.flatten().tolist()
        self.samples["reward"] += reward.flatten().tolist()

    def means(self, accelerator: Any = None) -> dict[str, float]:
        """Return the means by name, including perplexities; with `accelerator`, over all ranks.

        All ranks must have added the same names.
        """
        pairs = [
            torch.tensor(list(entries.values()) or [[0.0, 0.0]], dtype=torch.float64).sum(0)
            for entries in self.sums.values()
        ]
        sums = torch.stack(pairs) if pairs else torch.zeros(0, 2)
        if accelerator is not None and accelerator.num_processes > 1:
            sums = accelerator.reduce(sums.to(accelerator.device), "sum")
        means = {name: total / weight for name, (total, weight) in zip(self.sums, sums.tolist()) if weight}
        return means | perplexities(means)

    def per_document(self) -> dict[str, dict[str, list]]:
        """Return the documents of every metric that is not a curve, with the sum and weight of each document."""
        found = {}
        for name, entries in self.sums.items():
            if entries and not name.startswith(f"{CURVE}/"):
                ordered = sorted(entries.items())
                found[name] = {
                    "document": [document for document, _ in ordered],
                    "sum": [total for _, (total, _) in ordered],
                    "weight": [weight for _, (_, weight) in ordered],
                }
        return found

    def resampled(
        self, documents: Sequence[int], resamples: int, seed: int = 0, confidence: float = 0.95
    ) -> dict[str, np.ndarray]:
        """Return the means of `resamples` bootstrap samples of `documents`, by name: (R,) each.

        The bootstrap samples depend only on the seed and the documents, so samples of different models are paired.
        Their deviations from the mean of all documents are multiplied by `small_sample_factor`. NaN for metrics that
        apply to a single document.
        """
        rng = np.random.default_rng(seed)
        times_RD = rng.multinomial(len(documents), [1 / len(documents)] * len(documents), size=resamples)
        drawn = {}
        for name, entries in self.sums.items():
            pairs_D2 = np.array([entries.get(document, (0.0, 0.0)) for document in documents])
            totals_R, weights_R = (times_RD @ pairs_D2).T
            # A bootstrap sample may contain no document that the metric applies to.
            means_R = np.divide(totals_R, weights_R, out=np.full(resamples, np.nan), where=weights_R > 0)
            total, weight = pairs_D2.sum(0)
            if weight > 0:
                mean = total / weight
                means_R = mean + small_sample_factor(pairs_D2[:, 1], confidence) * (means_R - mean)
            drawn[name] = means_R
        for name, ce in CROSS_ENTROPY.items():
            if ce in drawn:
                drawn[name] = np.exp(np.minimum(drawn[ce], _MAX_EXPONENT))
        return drawn


def small_sample_factor(weights: np.ndarray, confidence: float) -> float:
    """Return the factor that widens a percentile bootstrap interval of a mean with these weights of documents (D,).

    Percentiles of a bootstrap of few documents cover too little: 86% instead of 95% with 8 documents of unequal length.
    The factor is the ratio of the t-interval to the normal interval with the plug-in variance, for the effective number
    of documents `(sum w)^2 / sum w^2`. NaN for a single document.
    """
    if np.count_nonzero(weights) < 2:
        return math.nan
    effective = max(2.0, weights.sum() ** 2 / np.square(weights).sum())
    freedom = effective - 1
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    # Expansion of the quantile of Student's t in 1 / freedom (Abramowitz and Stegun, 26.7.5).
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    t = z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
    return t / z * math.sqrt(effective / freedom)


def interval(draws: np.ndarray, confidence: float) -> list[float] | None:
    """Return the central interval that contains a fraction `confidence` of the draws (R,), or None if all are NaN."""
    draws = draws[~np.isnan(draws)]
    if not len(draws):
        return None
    tail = (1 - confidence) / 2
    return [float(bound) for bound in np.quantile(draws, [tail, 1 - tail])]


def _numbers(values: Any) -> np.ndarray:
    values = values.detach().double().cpu().numpy() if isinstance(values, Tensor) else values
    return np.asarray(values, dtype=np.float64)
