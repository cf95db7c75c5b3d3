"""The arguments of structured mode's trainers: TRL's GRPOConfig with the options that ebft declares."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig
from trl import GRPOConfig

from ebft.config import rules
from ebft.config.options import (
    DropoutOption,
    FeatureOptions,
    StructuredOptions,
    ThinkingOption,
    validate_options,
)
from ebft.config.trl import RolloutOptions
from ebft.errors import ConfigError

_OPTION = "It has an option of its own."
_TRAINERS = "The trainer sets it: completions are sampled by num_generations, scored and cut as its own options say."
# Keys of generation_kwargs that have an option, or that the trainer needs to have its way with.
_OWN_KWARGS = {
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty"), _OPTION),
    **dict.fromkeys(("max_tokens", "max_new_tokens", "max_length"), "Set max_completion_length."),
    **dict.fromkeys(("eos_token_id", "stop_token_id"), "Set stop_token_ids."),
    **dict.fromkeys(
        ("n", "num_return_sequences", "num_beams", "do_sample", "logprobs", "prompt", "model", "seed", "pad_token_id"),
        _TRAINERS,
    ),
}
# What else vLLM's completions take. Some of it bends the distribution, which importance sampling then corrects for.
_VLLM_KWARGS = {
    "stop",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "priority",
}
_NOT_FOR_GENERATE = {"stop_strings", "return_dict_in_generate", "output_scores", "output_logits", "prefill_chunk_size"}


def check_own_kwargs(given: dict[str, Any]) -> None:
    """Refuse keys of generation_kwargs that have an option of their own, or that are not the user's to set."""
    for key in given.keys() & _OWN_KWARGS.keys():
        raise ConfigError(f"generation_kwargs: {key} is not set there. {_OWN_KWARGS[key]}")


def generate_kwargs() -> set[str]:
    """Keys of generation_kwargs that `generate()` takes here."""
    return set(vars(GenerationConfig())) - _NOT_FOR_GENERATE


@dataclass
class GRPORolloutOptions(RolloutOptions, DropoutOption):
    """Options of rollouts: where from, how fresh."""


@dataclass
class StructuredEBFTOptions(FeatureOptions, ThinkingOption, StructuredOptions):
    """Options of the feature-matching reward, of the cross-entropy beside it, and of the completions' lengths."""


@dataclass
class RolloutGRPOConfig(GRPORolloutOptions, GRPOConfig):
    """TRL's GRPOConfig with ebft's rollouts: `vllm_mode`, `async_prefetch` and so on."""

    def __post_init__(self) -> None:
        if self.bf16 is None and not self.fp16:
            self.bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()  # TRL would ask for it anywhere
        if not torch.accelerator.is_available():
            self.use_cpu = True
        super().__post_init__()
        validate_options(GRPORolloutOptions, self)
        self._check_generation_kwargs()
        # Reward functions read the dataset's columns by name.
        self.remove_unused_columns = False
        completions = self.per_device_train_batch_size * self.steps_per_generation
        for found in (
            rules.prefetch(self.async_prefetch, self.uses_server, rules.in_python),
            rules.groups(completions, self.num_generations, rules.in_python),
            rules.regex(self.vllm_structured_outputs_regex, self.use_vllm, rules.in_python),
        ):
            if found:
                raise ConfigError(found)

    def _check_generation_kwargs(self) -> None:
        """Refuse what would make sampling differ from scoring, or would do nothing."""
        given = self.generation_kwargs or {}
        check_own_kwargs(given)
        known = _VLLM_KWARGS if self.use_vllm else generate_kwargs()
        for key in given:
            if key != "stop_token_ids" and key not in known:
                backend = "vLLM's completions" if self.use_vllm else "generate() (use_vllm: false)"
                raise ConfigError(
                    f"generation_kwargs: {backend} takes no {key!r} here. Remove it; stop_token_ids works with both."
                )

    @property
    def uses_server(self) -> bool:
        """Whether completions come from a vLLM server in a process of its own."""
        return self.use_vllm and self.vllm_mode != "colocate"


@dataclass
class EBFTConfig(StructuredEBFTOptions, RolloutGRPOConfig):
    """Arguments of EBFTTrainer: those of TRL's GRPO, of the rollouts, and of feature matching."""

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_options(StructuredEBFTOptions, self)
        if self.num_generations == 2 and self.diversity_coef != 0:
            warnings.warn(
                "diversity_coef has no gradient with num_generations: 2: two samples have the same penalty, and the "
                "mean of the group takes it away. Set num_generations to 3 or more, or diversity_coef to 0.",
                stacklevel=3,
            )


@dataclass
class AsyncEBFTConfig(EBFTConfig):
    """EBFTConfig for rollouts made ahead: from a vLLM server, while the batch before trains."""

    use_vllm: bool = field(default=True, metadata={"help": "Always: rollouts made ahead come from a vLLM server."})
    async_prefetch: bool = field(default=True, metadata={"help": "Always: this is what the class is for."})
