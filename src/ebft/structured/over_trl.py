"""TRL's GRPOTrainer with hooks and public names for its private interface.

All use of TRL's private interface is in this file; tests/test_contracts.py checks it against the installed release.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, device, nn
from trl import GRPOTrainer

COMPLETIONS = 3  # index of the completions in the result of TRL's `_generate`


class OverTRL(GRPOTrainer):
    """GRPOTrainer with hooks that subclasses can override."""

    # Hooks

    def take_rows(self, rows: list[dict[str, Any]]) -> None:
        """Receive the rows to generate completions for; `rollout_func` receives their prompts only."""

    def add_to_inputs(self, rows: list[dict[str, Any]], inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of the loss, computed from `rows` and their completions."""
        return inputs

    def after_generation(self, fields: list[Any]) -> list[Any]:
        """Return the fields of generation (prompts, completions at COMPLETIONS, ...) for the reward functions."""
        return fields

    def before_rewards(self) -> None:
        """Called before the reward functions."""

    def after_rewards(self, rows: list[dict[str, Any]], rewards: Tensor) -> Tensor:
        """Return the rewards of this process's completions: (completions, functions)."""
        return rewards

    def add_to_loss(self, model: nn.Module, inputs: dict[str, Any], loss: Tensor) -> Tensor:
        """Return the loss of a micro-batch, given TRL's loss."""
        return loss

    # Callers of the hooks

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self.take_rows(inputs)
        return self.add_to_inputs(inputs, super()._generate_and_score_completions(inputs))

    def _generate(self, prompts: list) -> tuple:
        return tuple(self.after_generation(list(super()._generate(prompts))))

    def _calculate_rewards(self, inputs: list[dict[str, Any]], *args: Any) -> Tensor:
        self.before_rewards()
        return self.after_rewards(inputs, super()._calculate_rewards(inputs, *args))

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        return self.add_to_loss(model, inputs, super()._compute_loss(model, inputs))

    # Public names

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

    def log_mean(self, mode: str, name: str, value: float) -> None:
        """Add a value to a metric of `train` or `eval`, whose mean is logged next."""
        self._metrics[mode][name].append(value)

    def drop_reward_logs(self, prefix: str) -> None:
        """Discard metrics logged by reward functions whose names start with `prefix`."""
        for name in [name for name in self._pending_metrics if name.startswith(prefix)]:
            del self._pending_metrics[name]

    def sync_before_rollouts(self, sampler: Any) -> None:
        """Make TRL synchronise `sampler` before rollouts and apply importance sampling with its log-probabilities."""
        self.use_vllm, self.vllm_generation, self._last_loaded_step = True, sampler, -1

    def sync_anew(self) -> None:
        """Mark the weights of the sampler as outdated."""
        self._last_loaded_step = -1

    def items_of(self, batches: list[Any], where: device) -> Any:
        """Return the number of items that the loss of the batches is normalised by."""
        return self._get_num_items_in_batch(batches, where)
