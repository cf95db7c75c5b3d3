"""Check of every batch that the server sampled it from the weights that were sent to it.

The log-probabilities that the server reports are compared with the trainer's own, for the version of the weights that
the batch was sampled from. Importance sampling and clipping would hide a difference, so they come after this.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from ebft.errors import RolloutError

# Limits of the mean absolute difference in nats: a multiple of the difference that dtypes and kernels cause, which is
# measured before training, and at least a value that is harmless for the loss.
_WARN, _STOP = (3.0, 0.05), (10.0, 0.2)
_UNKNOWN = 0.05  # the difference caused by dtypes and kernels, where it cannot be measured before training
_FITS_BETTER = 0.5  # other weights are the sampled ones if their difference is smaller by this factor
_ROUNDING = 1e-3  # differences below it are not compared with those of other weights
_MIN_TOKENS = 128  # nor are those of fewer tokens, where noise alone can make a difference smaller by this factor


@dataclass(frozen=True)
class Difference:
    """Log-probabilities of the trainer minus those of the server, over the sampled tokens of all processes.

    `mean` is that of absolute differences, in nats; `ratio_mean` and `ratio_max` are of the raw probability ratio.
    """

    mean: float
    ratio_mean: float
    ratio_max: float
    tokens: int

    @classmethod
    def of(cls, trainer: Tensor, server: Tensor, mask: Tensor, gather: Callable[[Tensor], Tensor]) -> Difference:
        """Compare log-probabilities (B, C) where `mask` (B, C) is set; tokens that the server did not score are NaN."""
        delta = (trainer.double() - server.double())[mask.bool() & ~server.isnan()]
        largest = delta.max() if len(delta) else delta.new_tensor(-math.inf)
        sums = torch.stack([delta.abs().sum(), delta.exp().sum(), largest, delta.new_tensor(len(delta))])
        sums = gather(sums.float()).view(-1, 4).double()
        count = max(1.0, sums[:, 3].sum().item())
        total = sums.sum(0)
        return cls((total[0] / count).item(), (total[1] / count).item(), sums[:, 2].max().exp().item(), int(count))


@dataclass(frozen=True)
class Weights:
    """Weights that the server may have sampled from: a name for messages, and a context in which the model has them."""

    name: str
    active: Callable[[], AbstractContextManager]


class SamplingCheck:
    """Warns of, and stops at, samples that are not from the weights they should be from.

    `server` names the server in messages. `floor` is the mean difference that was measured before training, None if
    unknown. `warn` and `stop` are limits of the mean difference in nats; None chooses them from `floor`.
    """

    def __init__(self, server: str, floor: float | None, warn: float | None, stop: float | None) -> None:
        floor = _UNKNOWN if floor is None else floor
        self._server = server
        self.warn = max(_WARN[0] * floor, _WARN[1]) if warn is None else warn
        self.stop = max(_STOP[0] * floor, _STOP[1]) if stop is None else stop
        self._has_warned = False

    def check_limits(self, found: Difference, version: str, step: int) -> None:
        """Warn once if the difference exceeds the first limit. Raises RolloutError if it exceeds the second."""
        if found.mean <= self.warn:
            return
        what = (
            f"Step {step}: {self._server} should have sampled this batch from {version}, but the log-probabilities it "
            f"reports differ from the trainer's by {found.mean:.3g} nats on average over {found.tokens} tokens (raw "
            f"ratio: mean {found.ratio_mean:.3g}, maximum {found.ratio_max:.3g})."
        )
        if found.mean > self.stop:
            raise RolloutError(
                f"{what} The limit is {self.stop:.3g} (vllm_logp_diff_stop). The server may have corrupted weights or "
                "sample at another temperature. Restart it with the config of this run (`ebft vllm-serve CONFIG`) and "
                "resume from the last checkpoint."
            )
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{what} The warning limit is {self.warn:.3g} (vllm_logp_diff_warn).", stacklevel=2)

    def check_others(self, found: Difference, version: str, step: int, others: dict[str, Difference]) -> None:
        """Raise RolloutError if the samples fit one of `others`, differences by name, much better than `version`."""
        if found.mean <= _ROUNDING or found.tokens < _MIN_TOKENS:
            return
        best = min((other.mean for other in others.values()), default=math.inf)
        if best >= _FITS_BETTER * found.mean:
            return
        sampled = " or ".join(name for name, other in others.items() if other.mean <= best + _ROUNDING)
        raise RolloutError(
            f"Step {step}: {self._server} should have sampled this batch from {version}, but it sampled from "
            f"{sampled}: the log-probabilities it reports differ by {found.mean:.3g} nats on average from those of the "
            f"former and by {best:.3g} from those of the latter. The server ignored the update or serves a stale copy "
            "of the weights. Restart it, and resume from the last checkpoint."
        )
