"""Metrics of an evaluation by TRL's GRPOTrainer that do not depend on its batches.

TRL logs the mean of the values of all batches, whatever the number of their rows. Here every held-out completion counts
once, and every token once in the means over tokens.

B  completions of a batch, of all processes   F  reward functions
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from trl import GRPOTrainer

from ebft.trainer.held_out_rows import EvaluatesRowsOnce

_OVER_TOKENS = ("kl", "entropy", "clip_ratio/", "cispo_clip_ratio", "vespo/")  # beginnings of names
_COMPLETION_IDS, _SAMPLED = 1, 2  # in the result of TRL's `_generate`


class CountsRowsOnce(EvaluatesRowsOnce, GRPOTrainer):
    """GRPOTrainer whose means of an evaluation are means over held-out completions, or their tokens."""

    _prefix = "eval"

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        self._prefix = metric_key_prefix
        self._by_batch: dict[str, list[tuple[float, float]]] = defaultdict(list)  # (value, weight) of each batch
        self._by_completion: dict[str, list[Tensor]] = defaultdict(list)  # (B, ...) of each batch
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def held_out_order(self, dataset: Any) -> list[int]:
        return list(self._get_eval_sampler(dataset))

    def _generate(self, prompts: list) -> tuple:
        found = super()._generate(prompts)
        if not self.model.training:
            ids, sampled = found[_COMPLETION_IDS], found[_SAMPLED]
            ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
            lengths = [len(row) for row in ids] if sampled is None else [sum(mask) for mask in sampled]
            table = torch.tensor([lengths, [row[-1] not in ends for row in ids]], device=self.accelerator.device).T
            self._by_completion["lengths"].append(self.accelerator.gather(table.contiguous()).cpu().double())
        return found

    def _calculate_rewards(self, *args: Any) -> Tensor:
        rewards = super()._calculate_rewards(*args)
        if not self.model.training:
            self._by_completion["rewards"].append(rewards.cpu().double())
            self._by_completion["weights"].append(torch.full((len(rewards),), 1.0 / self.copies, dtype=torch.float64))
        return rewards

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        if not self.model.training:
            mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
            self._tokens = self.accelerator.reduce(mask.sum(), "sum").item() / self.copies
        return super()._compute_loss(model, inputs)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, None, None]:
        logged = self._metrics["eval"]
        before = {name: len(values) for name, values in logged.items()}
        found = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        completions = len(inputs) * self.args.world_size / self.copies
        for name, values in logged.items():
            weight = self._tokens if name.startswith(_OVER_TOKENS) else completions
            added = values[before.get(name, 0) :]
            self._by_batch[name] += [(value, weight) for value in added if not math.isnan(value)]
        loss = self.accelerator.reduce(found[0], "mean").item()
        self._by_batch["loss"].append((loss, completions))
        return found

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if not self.model.training and self._by_completion:
            means = {name: _joined(name, pairs) for name, pairs in self._by_batch.items() if pairs} | self._of_all()
            logs[f"{self._prefix}_loss"] = means.pop("loss")
            self._metrics["eval"].update({name: [value] for name, value in means.items()})
            self._by_batch.clear()
            self._by_completion.clear()
        super().log(logs, start_time)

    def _of_all(self) -> dict[str, float]:
        """Return the metrics that are computed from the rewards and lengths of all completions, by TRL's names."""
        table = {name: torch.cat(parts) for name, parts in self._by_completion.items()}
        rewards_BF, weights = table["rewards"], table["weights"]
        found = {}
        for name in set(self.reward_func_names):  # TRL logs the mean over functions with the same name
            same = [i for i, other in enumerate(self.reward_func_names) if other == name]
            means, stds = zip(*(_mean_and_std(rewards_BF[:, i], weights) for i in same))
            found[f"rewards/{name}/mean"], found[f"rewards/{name}/std"] = (sum(x) / len(same) for x in (means, stds))
        total = (rewards_BF * self.reward_weights.cpu()).nansum(1).masked_fill(rewards_BF.isnan().all(1), math.nan)
        found["reward"], found["reward_std"] = _mean_and_std(total, weights)
        groups = total.view(-1, self.num_generations_eval)
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
