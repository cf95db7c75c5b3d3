"""Metrics of an evaluation by TRL's GRPOTrainer that do not depend on its batches.

TRL logs the mean of the values of all batches, whatever the number of their rows. Here every held-out completion counts
once, and every token once in the means over tokens.

B  completions of a batch, of all processes   F  reward functions
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

_OVER_TOKENS = ("kl", "entropy", "clip_ratio/", "cispo_clip_ratio", "vespo/")  # beginnings of names


class HeldOutCompletions:
    """What is known of the completions of one evaluation, whose metrics are logged with `prefix`.

    `tokens`: those of the loss of the current batch. All counts are divided by the processes that evaluate the same
    rows at the same time.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.tokens = 0.0
        self._by_batch: dict[str, list[tuple[float, float]]] = defaultdict(list)  # (value, weight) of each batch
        self._by_completion: dict[str, list[Tensor]] = defaultdict(list)  # (B, ...) of each batch

    def add_lengths(self, table: Tensor) -> None:
        """Add the number of sampled tokens of each completion, and whether it was cut at its limit: (B, 2)."""
        self._by_completion["lengths"].append(table.cpu().double())

    def add_rewards(self, rewards_BF: Tensor, copies: int) -> None:
        """Add the rewards of a batch that `copies` processes evaluate."""
        self._by_completion["rewards"].append(rewards_BF.cpu().double())
        self._by_completion["weights"].append(torch.full((len(rewards_BF),), 1.0 / copies, dtype=torch.float64))

    def add_logged(self, logged: dict[str, list[float]], completions: float) -> None:
        """Add what was logged of a batch, by name."""
        for name, values in logged.items():
            weight = self.tokens if name.startswith(_OVER_TOKENS) else completions
            self._by_batch[name] += [(value, weight) for value in values if name == "loss" or not math.isnan(value)]

    def drain(self, names: Sequence[str], reward_weights: Tensor, group_size: int) -> dict[str, float]:
        """Return the means of all metrics, among them `loss`, and forget the completions; empty if there are none.

        `names`: of the reward functions, (F,).
        """
        if not self._by_completion:
            return {}
        means = {name: _joined(name, pairs) for name, pairs in self._by_batch.items() if pairs}
        means |= self._of_all(names, reward_weights, group_size)
        self._by_batch.clear()
        self._by_completion.clear()
        return means

    def _of_all(self, names: Sequence[str], reward_weights: Tensor, group_size: int) -> dict[str, float]:
        """Return the metrics that are computed from the rewards and lengths of all completions, by TRL's names."""
        table = {name: torch.cat(parts) for name, parts in self._by_completion.items()}
        rewards_BF, weights = table["rewards"], table["weights"]
        found = {}
        for name in set(names):  # TRL logs the mean over functions with the same name
            same = [i for i, other in enumerate(names) if other == name]
            means, stds = zip(*(_mean_and_std(rewards_BF[:, i], weights) for i in same))
            found[f"rewards/{name}/mean"], found[f"rewards/{name}/std"] = (sum(x) / len(same) for x in (means, stds))
        total = (rewards_BF * reward_weights.cpu()).nansum(1).masked_fill(rewards_BF.isnan().all(1), math.nan)
        found["reward"], found["reward_std"] = _mean_and_std(total, weights)
        groups = total.view(-1, group_size)
        spread = groups.nan_to_num(-math.inf).amax(1) - groups.nan_to_num(math.inf).amin(1)
        found["frac_reward_zero_std"] = _mean_and_std((spread.abs() < 1e-8).double(), weights.view_as(groups)[:, 0])[0]
        lengths, is_truncated = table["lengths"].unbind(1)
        ended = is_truncated == 0
        for name, kept in (("", torch.ones_like(ended)), ("_terminated", ended)):
            some = lengths[kept] if kept.any() else torch.zeros(1)
            weights_of_some = weights[kept] if kept.any() else torch.ones(1)
            found[f"completions/mean{name}_length"] = _mean_and_std(some, weights_of_some)[0]
            found[f"completions/min{name}_length"] = some.min().item()
            found[f"completions/max{name}_length"] = some.max().item()
        found["completions/clipped_ratio"] = _mean_and_std(is_truncated, weights)[0]
        return found


def _joined(name: str, pairs: list[tuple[float, float]]) -> float:
    """Return the minimum, the maximum or the weighted mean of the values of all batches, by the name of the metric."""
    values = [value for value, _ in pairs]
    if name.endswith(("min", "max")):
        return min(values) if name.endswith("min") else max(values)
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else values[0]


def _mean_and_std(values: Tensor, weights: Tensor) -> tuple[float, float]:
    """Return the mean and the sample standard deviation (with N - 1) of values (B,) that are not NaN."""
    values, weights = values[~values.isnan()], weights[~values.isnan()]
    total = weights.sum()
    mean = (values * weights).sum() / total
    variance = (weights * (values - mean).square()).sum() / (total - 1)
    return mean.item(), variance.sqrt().item()
