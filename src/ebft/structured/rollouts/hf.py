"""Rollouts with the policy's `generate`, in the training process, without a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import pad

from ebft.models.causal_lm import evaluating, unwrap_adapter
from ebft.models.sharding import is_sharded
from ebft.prefix.policy import run_wrapped
from ebft.structured.rollouts.backend import Completion, Sampling
from ebft.structured.rollouts.shared import SharedPromptSampler


class Generator:
    """Generates with transformers' `generate`, with prompts padded on the left; `temperature` 0 is greedy decoding."""

    def __init__(self, sampling: Sampling, pad_token_id: int, cache_implementation: str | None = None) -> None:
        self._pad_token_id = pad_token_id
        self._end_ids = sorted(sampling.end_ids)
        warpers = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
        }
        self._kwargs = {
            "do_sample": sampling.temperature > 0,
            **(warpers if sampling.temperature > 0 else {}),
            "repetition_penalty": sampling.repetition_penalty,
            "eos_token_id": self._end_ids or None,
            "pad_token_id": pad_token_id,
            "cache_implementation": cache_implementation,
            **sampling.extra,
        }

    def __call__(self, model: nn.Module, prompts: list[list[int]], max_tokens: list[int]) -> list[Completion]:
        """Return one completion per prompt; the model must be in eval mode, with gradients disabled."""
        if is_sharded(model):
            return run_wrapped(model, lambda causal_lm: self._generate(causal_lm, prompts, max_tokens))
        return self._generate(unwrap_adapter(model), prompts, max_tokens)

    def _generate(
        self, causal_lm: PreTrainedModel, prompts: list[list[int]], max_tokens: list[int]
    ) -> list[Completion]:
        input_ids = pad([torch.tensor(ids) for ids in prompts], self._pad_token_id, "left").to(causal_lm.device)
        attention_mask = pad([torch.ones(len(ids), dtype=torch.long) for ids in prompts], 0, "left").to(
            input_ids.device
        )
        kwargs = {**self._kwargs, "max_new_tokens": max(max_tokens)}
        with _only(causal_lm, GenerationConfig(**kwargs, disable_compile=True)):
            output = causal_lm.generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                stopping_criteria=StoppingCriteriaList([_OwnLimit(input_ids.shape[1], max_tokens)]),
                synced_gpus=False,  # see ebft.structured.rollouts.in_step
            )
        sampled = output[:, input_ids.shape[1] :].tolist()
        return [Completion(self._cut(ids[:limit]), None) for ids, limit in zip(sampled, max_tokens)]

    def _cut(self, ids: list[int]) -> list[int]:
        """Return the ids up to and including the first end token; the rest is padding."""
        end = next((index for index, token in enumerate(ids) if token in self._end_ids), len(ids))
        return ids[: end + 1]


class HFBackend:
    """Samples from the current policy of a trainer, in eval mode; with shared prompts where the model supports them."""

    def __init__(self, trainer: Any, sampling: Sampling, pad_token_id: int) -> None:
        self._trainer = trainer
        shares = trainer.shares_prompts and trainer.args.cache_implementation is None
        if shares and SharedPromptSampler.supports(sampling):
            self._sample = SharedPromptSampler(sampling)
        else:
            self._sample = Generator(sampling, pad_token_id, trainer.args.cache_implementation)

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[Completion]:
        trainer = self._trainer
        with (
            unwrap_model_for_generation(
                trainer.model_wrapped,
                trainer.accelerator,
                gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
            ) as policy,
            evaluating(policy),
            trainer.accelerator.autocast(),
        ):
            return self._sample(policy, prompts, max_tokens)


class ModelBackend:
    """Generates with a model outside of training."""

    def __init__(self, model: nn.Module, sampling: Sampling, pad_token_id: int) -> None:
        self._model, self._generator = model, Generator(sampling, pad_token_id)

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[Completion]:
        with evaluating(self._model):
            return self._generator(self._model, prompts, max_tokens)


@contextmanager
def _only(causal_lm: PreTrainedModel, config: GenerationConfig) -> Iterator[PreTrainedModel]:
    """Temporarily replace the model's generation config, which transformers uses for values unset in `config`."""
    own, causal_lm.generation_config = causal_lm.generation_config, config
    try:
        yield causal_lm
    finally:
        causal_lm.generation_config = own


class _OwnLimit(StoppingCriteria):
    """Stops each row of a batch at a separate number of new tokens."""

    def __init__(self, prompt_length: int, max_tokens: list[int]) -> None:
        self._stop_at = torch.tensor(max_tokens) + prompt_length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids.shape[1] >= self._stop_at.to(input_ids.device)
