"""Public names for what else is used of the private interface of TRL's GRPOTrainer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, device, nn
from trl import GRPOTrainer


class NamesPrivates(GRPOTrainer):
    """GRPOTrainer with public names for its counters, logs, buffers and synchronisation."""

    def completion_logps(self, model: nn.Module, ids: Tensor, mask: Tensor, length: int) -> Tensor:
        """Return the log-probabilities (B, length) of the last `length` tokens of `ids` (B, tokens)."""
        return self._get_per_token_logps_and_entropies(model, ids, mask, length)[0]

    @property
    def trained_micro_batches(self) -> int:
        return self._step

    @trained_micro_batches.setter
    def trained_micro_batches(self, count: int) -> None:
        self._step = count

    @property
    def generation_batch(self) -> list[dict[str, Any]] | None:
        """The inputs of the micro-batches of the current generation step; None before the first."""
        return self._buffered_inputs

    @property
    def has_entropy_bonus(self) -> bool:
        return self._entropy_bonus_enabled

    @property
    def text_tokenizer(self) -> Any:
        """The tokenizer inside `processing_class`."""
        return self._tokenizer

    def importance_ratio(self, difference: Tensor) -> Tensor:
        """Return the ratios, (B, C) or (B, 1), that correct for sampling from another policy, as TRL computes them.

        `difference` (B, C): log-probabilities of the trainer minus those of the sampler, 0 at masked tokens.
        """
        mode = self.vllm_importance_sampling_mode
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        ratio = (difference.sum(-1, keepdim=True) if mode.startswith("sequence") else difference).exp()
        if mode.endswith("truncate"):
            return ratio.clamp(low, high) if low is not None or high is not None else ratio
        outside = (ratio < (low if low is not None else 0.0)) | (ratio > (high if high is not None else float("inf")))
        return ratio.masked_fill(outside, 0.0)

    def log_mean(self, mode: str, name: str, value: float) -> None:
        """Add a value to a metric of `train` or `eval`, whose mean is logged next."""
        self._metrics[mode][name].append(value)

    def log_advantages(self, advantages: Tensor) -> None:
        """Log `advantages` of the completions of all processes in place of TRL's."""
        logged = self._logs["advantages"]
        for _ in range(min(len(advantages), len(logged))):
            logged.pop()
        logged.extend(advantages.tolist())

    def drop_reward_logs(self, prefix: str) -> None:
        """Discard metrics logged by reward functions whose names start with `prefix`."""
        for name in [name for name in self._pending_metrics if name.startswith(prefix)]:
            del self._pending_metrics[name]

    def sync_before_rollouts(self, sampler: Any) -> None:
        """Make TRL synchronise `sampler` before rollouts and apply importance sampling with its log-probabilities."""
        self.use_vllm, self.vllm_generation, self._last_loaded_step = True, sampler, -1

    def sync_if_outdated(self) -> None:
        """Synchronise the sampler, if there is one, unless that was done in this step."""
        if self.use_vllm and self.state.global_step != self._last_loaded_step:
            self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step

    def sync_anew(self) -> None:
        """Mark the weights of the sampler as outdated."""
        self._last_loaded_step = -1

    def items_of(self, batches: list[Any], where: device) -> Any:
        """Return the number of items that the loss of the batches is normalised by."""
        return self._get_num_items_in_batch(batches, where)
