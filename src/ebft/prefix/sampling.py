"""Drawing tokens from probabilities, given uniform random numbers, and the tokens that truncated sampling can draw.

R  rows    V  vocabulary    K  tokens drawn in each row
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ebft.machine import copy_to

# Number of adjacent tokens in a group; sampling first selects a group, then a token in it.
_RUN = 512
_BELOW_ONE = 1 - 2**-52  # the product with a float64 is less than that float64


@dataclass(frozen=True)
class Truncation:
    """The tokens that can be drawn with min-p, top-k and top-p sampling, applied in this order, as in vLLM.

    A token is kept by `min_p` if its probability is at least that fraction of the largest, by `top_k` if it is one of
    the k most likely, and by `top_p` if it is in the smallest set of most likely tokens whose probability, among those
    kept so far, reaches top_p.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, top_k: int | None, top_p: float, min_p: float | None) -> Truncation | None:
        """Return the truncation by these parameters, or None if they keep every token."""
        found = cls(max(top_k or 0, 0), top_p, min_p or 0.0)
        return None if found == cls() else found

    def kept(self, scores: Tensor) -> Tensor:
        """Return the mask (R, V) of the kept tokens, given logits (R, V) at the sampling temperature."""
        scores = scores.float()
        if self.min_p:
            scores = scores.masked_fill(scores < scores.amax(-1, keepdim=True) + math.log(self.min_p), -math.inf)
        if 0 < self.top_k < scores.shape[-1]:
            scores = scores.masked_fill(scores < scores.topk(self.top_k).values[:, -1:], -math.inf)
        if self.top_p < 1:
            # The smallest set of most likely tokens whose mass reaches top_p, at least one.
            ordered, index = scores.softmax(-1).sort(-1, descending=True)
            dropped = ordered.cumsum(-1) - ordered >= self.top_p * ordered.sum(-1, keepdim=True)
            return torch.zeros_like(ordered).scatter(-1, index, ordered.masked_fill(dropped, 0.0)) > 0
        return scores > -math.inf


def sample_tokens(probabilities: Tensor, noise: Tensor) -> Tensor:
    """Sample tokens (R, K) from probabilities (R, V) by inverting the cumulative distribution at noise (R, K).

    The tokens are a deterministic function of the noise, however rows are batched.
    """
    # Select a group of adjacent tokens first, then a token in it, which keeps the cumulative sums short. They are in
    # float64, because float32 would lose the small increments of the tail.
    vocabulary = probabilities.shape[-1]
    runs = vocabulary // _RUN
    sums = probabilities[:, : runs * _RUN].unflatten(-1, (runs, _RUN)).sum(-1)
    sums = torch.cat([sums, probabilities[:, runs * _RUN :].sum(-1, keepdim=True)], -1)
    run, target, cumulative = _select(sums, noise)
    weight = sums.gather(-1, run).double()
    below = cumulative.gather(-1, run) - weight
    rest = ((target - below) / weight).clamp_(0.0, _BELOW_ONE)  # the relative position in the selected group, in [0, 1)
    first = run.unsqueeze(-1) * _RUN
    index = first + torch.arange(_RUN, device=probabilities.device)  # (R, K, _RUN)
    inside = probabilities.gather(-1, index.clamp_max(vocabulary - 1).flatten(1)).view_as(index)
    token, *_ = _select(inside.masked_fill_(index >= vocabulary, 0.0), rest.unsqueeze(-1))
    # NaN probabilities select an index past the end; the check of the loss then reports that the model diverged.
    return (first + token).clamp_max_(vocabulary - 1).squeeze(-1)


def _select(weights: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Invert the cumulative sum of weights (..., V) at noise (..., K) in [0, 1). Returns the selected indices (..., K),
    none with weight 0, the noise times the sum, and the cumulative sum."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = noise * cumulative[..., -1:]
    return torch.searchsorted(cumulative, target, right=True).clamp_max_(weights.shape[-1] - 1), target, cumulative


# Elements of a softmax that are processed at once; on CPU, as many as fit in the processor's cache.
_SOFTMAX_PER_TILE = {"cpu": 2**18, "other": 2**25}


class Softmax:
    """softmax(logits / temperature) of logits (R, V), in float32, used for both sampling and scoring.

    With `truncation`, only the tokens that it keeps have a probability, and `tokens` (R, K), which were sampled: other
    weights, or rounding, could exclude them. probabilities (R, V): the softmax itself.
    """

    def __init__(
        self, logits: Tensor, temperature: float, truncation: Truncation | None = None, tokens: Tensor | None = None
    ):
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if temperature != 1:
            scores = scores / temperature if scores is logits else scores.div_(temperature)
        self._largest = scores.amax(-1, keepdim=True)
        scores = scores - self._largest if scores is logits else scores.sub_(self._largest)
        if truncation is not None:
            kept = truncation.kept(scores)
            kept = kept if tokens is None else kept.scatter_(-1, tokens, True)
            scores.masked_fill_(~kept, -torch.inf)
        # A model may exclude a token with a logit of minus infinity; clamping makes its entropy term 0 instead of NaN.
        self._scores = scores.clamp_min_(torch.finfo(torch.float32).min)
        self.probabilities = self._scores.softmax(-1)  # a single fused pass, several times as fast as exp and sum
        # The largest score is 0, so the largest probability is 1 / sum(exp(scores)).
        self._log_sum = -self.probabilities.amax(-1, keepdim=True).log()

    def logps(self, tokens: Tensor) -> Tensor:
        """Return the log-probabilities (R, K) of tokens (R, K)."""
        return self._scores.gather(-1, tokens) - self._log_sum

    def log_sum_exp(self) -> Tensor:
        """Return the log-sum-exp of logits / temperature: (R, 1)."""
        return self._largest + self._log_sum

    def entropy(self) -> Tensor:
        """Return the entropy in nats: (R, 1)."""
        # Autocast would round to bfloat16, in which the score of an excluded token is minus infinity.
        with torch.autocast(self._scores.device.type, enabled=False):
            return self._log_sum - torch.linalg.vecdot(self.probabilities, self._scores).unsqueeze(-1)

    def grad_of_entropy(self) -> Tensor:
        """Return the gradients (R, V) of the entropy with respect to logits / temperature: -p (log p + entropy)."""
        return -self.probabilities * (self._scores - self._log_sum + self.entropy())

    def mean_score(self) -> Tensor:
        """Return the mean of logits / temperature over the vocabulary: (R, 1)."""
        return self._largest + self._scores.mean(-1, keepdim=True)

    def log_sum_of_squares(self) -> Tensor:
        """Return the log of the probability that two samples are equal: (R, 1)."""
        return self.probabilities.square().sum(-1, keepdim=True).log()

    def most_likely(self, known: int | None = None) -> Tensor:
        """Return the most likely token, of the first `known`: (R, 1)."""
        return self._scores[:, :known].argmax(-1, keepdim=True)


def tiles(logits: Tensor) -> list[slice]:
    """Return the rows of logits (R, V) whose softmax is computed at once."""
    return slices(len(logits), max(1, of_device(_SOFTMAX_PER_TILE, logits.device) // logits.shape[-1]))


def of_device(sizes: dict[str, int], device: torch.device) -> int:
    """Return the size for a device."""
    return sizes["cpu" if device.type == "cpu" else "other"]


def on_device(values: list[Any] | Tensor, device: torch.device) -> Tensor:
    """Return a tensor of integers that are known on the host; copying them does not wait for the device."""
    return copy_to(device, torch.as_tensor(values, dtype=torch.long))[0]


def slices(count: int, size: int) -> list[slice]:
    """Return slices of `size` that cover `count` rows; for no rows, one empty slice, to keep the graph connected."""
    return [slice(start, min(start + size, count)) for start in range(0, max(count, 1), size)]
