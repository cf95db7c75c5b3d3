"""Arguments of the trainers of structured mode: TRL's GRPOConfig with additional ebft options."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import torch
from transformers import GenerationConfig
from trl import GRPOConfig

from ebft.config import options, rules
from ebft.config.section import with_prefix
from ebft.config.trl import RolloutOptions
from ebft.transformers_internals import rename_checkpointing

# Keys of generation_kwargs that have a separate option, or that the trainer sets itself.
_OWN_KWARGS = {
    "Use the option of the same name.": "temperature top_p top_k min_p repetition_penalty",
    "Set max_completion_length.": "max_tokens max_new_tokens max_length",
    "Set stop_token_ids.": "eos_token_id stop_token_id",
    "It is set by the trainer.": ("n num_return_sequences num_beams do_sample logprobs prompt model seed pad_token_id"),
}
# Other parameters of vLLM's completions. Some change the sampling distribution, which importance sampling corrects.
_VLLM_KWARGS = {"stop", "include_stop_str_in_output", "ignore_eos", "min_tokens", "frequency_penalty", "priority"}
_VLLM_KWARGS |= {"presence_penalty", "logit_bias", "allowed_token_ids", "bad_words"}
_NOT_FOR_GENERATE = {"stop_strings", "return_dict_in_generate", "output_scores", "output_logits", "prefill_chunk_size"}


STOPS = "stop_token_ids"  # the key of generation_kwargs that all backends support


def generate_kwargs() -> set[str]:
    """Return the keys of generation_kwargs that are supported with `generate()`."""
    return set(vars(GenerationConfig())) - _NOT_FOR_GENERATE


def check_generation_kwargs(given: dict[str, Any], use_vllm: bool) -> None:
    """Raise ConfigError for keys that would make sampling differ from scoring or would have no effect."""
    known = {STOPS, *(_VLLM_KWARGS if use_vllm else generate_kwargs())}
    backend = "vLLM's completions" if use_vllm else "generate() (use_vllm: false)"
    reason = f"is not supported with {backend}. Remove it ({STOPS} is supported with all backends)."
    reasons = {key: f"{key!r} {reason}" for key in given if key not in known}
    reasons |= {key: f"{key} cannot be set here. {why}" for why, keys in _OWN_KWARGS.items() for key in keys.split()}
    rules.refuse(f"generation_kwargs: {reasons[key]}" for key in given if key in reasons)


@dataclass
class GRPORolloutOptions(RolloutOptions, options.RolloutLogOption, options.DropoutOption, options.SharedPrefixOption):
    """Options of rollouts (backend, weight synchronisation) and of the forward passes of the loss."""


@dataclass
class StructuredEBFTOptions(options.FeatureOptions, options.ThinkingOption, options.StructuredOptions):
    """Options of the feature-matching reward, the cross-entropy term and the completion lengths."""


@dataclass
class RolloutGRPOConfig(GRPORolloutOptions, GRPOConfig):
    """TRL's GRPOConfig with ebft's rollout options, such as `vllm_mode` and `async_prefetch`."""

    def __post_init__(self) -> None:
        if self.bf16 is None and not self.fp16:
            # TRL enables it on any device
            self.bf16: bool | None = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        if not torch.accelerator.is_available():
            self.use_cpu = True
        if self.loss_type == "cispo" and self.epsilon_high is None:
            self.epsilon_high = 5.0  # TRL's recommendation; its default is epsilon, which scales every gradient by 0.2
        rename_checkpointing(self)  # TRL's default has the older name
        if self.vllm_server_base_url is not None:
            url = urlsplit(f"//{self.vllm_server_base_url.removeprefix('http://')}")
            self.vllm_server_host, self.vllm_server_port = url.hostname, url.port
        super().__post_init__()
        rules.validate_options(GRPORolloutOptions, self)
        check_generation_kwargs(self.generation_kwargs or {}, self.use_vllm)
        # Reward functions read the dataset's columns by name.
        self.remove_unused_columns: bool = False
        rules.refuse(self.problems())

    def problems(self) -> Iterator[str]:
        """What cannot be trained with these arguments."""
        if not self.temperature > 0:
            yield f"temperature: {self.temperature!r} is invalid: expected a number above 0."
        if self.neftune_noise_alpha is not None:
            yield f"neftune_noise_alpha is not supported: {rules.NEFTUNE}. Remove it."
        size, steps = self.per_device_train_batch_size, self.steps_per_generation
        step = "gradient_accumulation_steps" if steps == self.gradient_accumulation_steps else "steps_per_generation"
        yield from rules.logged_rollouts(self.log_rollouts, self.log_completions, rules.in_python)
        yield from rules.prefetch(self.async_prefetch, self.uses_server, rules.in_python)
        yield from rules.groups(size, steps, self.num_generations, rules.in_python, step)
        yield from rules.regex(self.vllm_structured_outputs_regex, self.use_vllm, rules.in_python)

    @property
    def uses_server(self) -> bool:
        """Whether completions are generated by a vLLM server in a separate process."""
        return self.use_vllm and self.vllm_mode != "colocate"


@with_prefix
@dataclass
class EBFTConfig(StructuredEBFTOptions, RolloutGRPOConfig):
    """Arguments of EBFTTrainer: TRL's GRPOConfig with the options of rollouts and of feature matching."""

    scale_rewards: str | bool | None = field(
        default=None,
        metadata={
            "help": "Divide advantages by the standard deviation of the rewards over the group (`group` or True) or "
            "the batch (`batch`), or not (`none` or False). If unset, `group` with advantage_estimator group_norm, and "
            "`none` otherwise."
        },
    )

    def __post_init__(self) -> None:
        rules.validate_options(StructuredEBFTOptions, self)
        if self.scale_rewards is None:
            self.scale_rewards = "group" if self.advantage_estimator == "group_norm" else "none"
        rules.select_by_cfm_loss(self)
        super().__post_init__()
        cancels = self.advantage_estimator == "group_norm" or self.rloo_baseline == "mean"
        if self.num_generations == 2 and self.diversity_coef != 0 and cancels:
            warnings.warn(
                "diversity_coef has no effect on the gradient with num_generations: 2 and this baseline, because both "
                "samples have the same penalty. Set num_generations to 3 or more, diversity_coef to 0, or "
                "advantage_estimator: rloo with rloo_baseline: independent.",
                stacklevel=3,
            )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.num_generations_eval == 1:
            yield (
                "num_generations_eval: 1 is not supported by EBFT, whose held-out metrics compare the completions of a "
                "prompt with each other. Set at least 2, or leave it out to use num_generations."
            )
        yield from rules.aggregation(self.multi_objective_aggregation, self.advantage_estimator, rules.in_python)
        scales = self.scale_rewards not in ("none", False)
        is_independent = self.advantage_estimator == "rloo" and self.rloo_baseline == "independent"
        if scales and is_independent and self.num_generations == 2 and self.diversity_coef != 0:
            yield (
                "scale_rewards is not supported with advantage_estimator: rloo, rloo_baseline: independent and "
                "num_generations: 2: the standard deviation of two similar samples is near 0, but their advantages "
                "contain their similarity. Set num_generations to 3 or more, or scale_rewards: none."
            )


@with_prefix
@dataclass
class AsyncEBFTConfig(EBFTConfig):
    """EBFTConfig with prefetched rollouts: a vLLM server generates them while the previous batch trains."""

    use_vllm: bool = field(default=True, metadata={"help": "Always True: prefetching requires a vLLM server."})
    async_prefetch: bool = field(default=True, metadata={"help": "Always True for this class."})
