"""The distribution of tokens given logits, and the parts in which large tensors of logits are processed.

R  rows   V  vocabulary   K  tokens scored in each row
"""

from __future__ import annotations

import torch
from torch import Tensor

from ebft.prefix.sampling import Truncation

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
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        if temperature != 1:
            scores /= temperature
        self._largest = scores.amax(-1, keepdim=True)
        scores -= self._largest
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

    def most_likely(self) -> Tensor:
        """Return the most likely token: (R, 1)."""
        return self._scores.argmax(-1, keepdim=True)


def tiles(logits: Tensor) -> list[slice]:
    """Return the rows of logits (R, V) whose softmax is computed at once."""
    return slices(len(logits), max(1, of_device(_SOFTMAX_PER_TILE, logits.device) // logits.shape[-1]))


def of_device(sizes: dict[str, int], device: torch.device) -> int:
    """Return the size for a device."""
    return sizes["cpu" if device.type == "cpu" else "other"]


def slices(count: int, size: int) -> list[slice]:
    """Return slices of `size` that cover `count` rows; for no rows, one empty slice, to keep the graph connected."""
    return [slice(start, min(start + size, count)) for start in range(0, max(count, 1), size)]
