"""Hooks in the steps of TRL's GRPOTrainer: generation, rewards, inputs of the loss, and the loss."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from trl import GRPOTrainer

from ebft.config.user_code import state_kept
from ebft.reward_functions.checked import name_of
from ebft.structured.over_trl.grouped_batches import ROW, by_group
from ebft.structured.shared_prompt import Padded


class HasHooks(GRPOTrainer):
    """GRPOTrainer with hooks that subclasses can override.

    `inputs_of_loss` are the inputs of the micro-batch whose loss is being computed, None at other times, and so are
    results that `score` leaves for `add_to_loss` in `reference_logps`. `keeps_groups`: see `by_group`.
    """

    inputs_of_loss: dict[str, Any] | None = None
    reference_logps: Any = None
    keeps_groups: bool = False
    use_vllm: bool
    vllm_generation: Any

    # Hooks

    def take_rows(self, rows: list[dict[str, Any]]) -> None:
        """Receive the rows to generate completions for; `rollout_func` receives their prompts only."""

    def add_to_inputs(self, rows: list[dict[str, Any]], inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of the loss, computed from `rows` and their completions."""
        return inputs

    def after_inputs(self, rows: list[dict[str, Any]], inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs to train on, given the complete inputs of the loss for these rows."""
        return inputs

    def after_generation(self, fields: list[Any]) -> list[Any]:
        """Return the fields of generation (prompts, completions at COMPLETIONS, ...) for the reward functions."""
        return fields

    def sample_turn(self, prompt_ids: list[list[int]]) -> tuple[list[list[int]], list[list[float]] | None] | None:
        """Return one completion per prompt and their log-probabilities, None if unknown; or None to let TRL sample.

        TRL calls tools between such turns.
        """
        return None

    def before_rewards(self) -> None:
        """Called before the reward functions."""

    def after_rewards(self, rows: list[dict[str, Any]], rewards: Tensor) -> Tensor:
        """Return the rewards of the completions of all processes: (completions, functions). `rows` are this one's."""
        return rewards

    def score(
        self, model: nn.Module, prompts: Padded, completions: Padded, with_entropies: bool
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return the log-probabilities and entropies of completions, (B, C) each, or None to let TRL compute them."""
        return None

    def add_to_loss(self, model: nn.Module, inputs: dict[str, Any], loss: Tensor) -> Tensor:
        """Return the loss of a micro-batch, given TRL's loss."""
        return loss

    # Callers of the hooks

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self.take_rows(inputs)
        found = self.add_to_inputs(inputs, super()._generate_and_score_completions(inputs))
        found = self.after_inputs(inputs, found)
        return found | {ROW: torch.arange(len(inputs))}

    def _generate(self, prompts: list) -> tuple:
        return tuple(self.after_generation(list(super()._generate(prompts))))

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> tuple:
        sampled = self.sample_turn(prompt_ids)
        return super()._generate_single_turn(prompt_ids, *args, **kwargs) if sampled is None else sampled

    def _calculate_rewards(self, inputs: list[dict[str, Any]], *args: Any) -> Tensor:
        self.before_rewards()
        later = [name_of(inspect.unwrap(each)) for each in self.reward_funcs if inspect.iscoroutinefunction(each)]
        with state_kept(" ".join(["The reward functions", ", ".join(later)]).strip()):  # they run at the same time
            rewards = super()._calculate_rewards(inputs, *args)
        return self.after_rewards(inputs, rewards)

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        self.inputs_of_loss = inputs
        try:
            return self.add_to_loss(model, inputs, super()._compute_loss(model, inputs))
        finally:
            self.inputs_of_loss = self.reference_logps = None

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        scored: list[tuple[Tensor, Tensor] | None] = []
        if not compute_aux_loss and all(value is None for value in multimodal.values()):
            with self.accelerator.autocast():
                for ids, mask in zip(*(x.split(batch_size or len(x)) for x in (input_ids, attention_mask))):
                    split = (part for x in (ids, mask) for part in x.tensor_split([-logits_to_keep], dim=1))
                    prompts, completions, prompt_mask, completion_mask = split
                    scored.append(
                        self.score(model, (prompts, prompt_mask), (completions, completion_mask), compute_entropy)
                    )
        if not scored or scored[0] is None:
            options = {"compute_entropy": compute_entropy, "compute_aux_loss": compute_aux_loss, **multimodal}
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, **options
            )
        logps, entropies = zip(*scored)
        return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, None

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not self.keeps_groups or self._buffered_inputs is before or len(self._buffered_inputs) == 1:
            return inputs
        self._buffered_inputs = by_group(self._buffered_inputs, self.num_generations)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]
