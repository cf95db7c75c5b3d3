"""Arguments of the trainers of structured mode, TRL's GRPOConfig with additional ebft options; checks of arguments,
of rows, and of code of the user, which takes part in rollouts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import Any
from urllib.parse import urlsplit

import torch
from datasets import Dataset
from transformers import GenerationConfig
from trl import GRPOConfig

from ebft.config import options, rules
from ebft.config.section import with_prefix
from ebft.config.trl import RolloutOptions
from ebft.config.user_functions import user_code
from ebft.errors import DataError, RolloutError
from ebft.models.sharding import load_whole
from ebft.structured.reward import FeatureMatchingReward
from ebft.transformers_internals import rename_checkpointing, use_one_gpu

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
            yield "num_generations_eval: 1 is not supported by EBFT, which compares completions. Set at least 2."
        yield from rules.aggregation(self.multi_objective_aggregation, self.advantage_estimator, rules.in_python)
        scales = self.scale_rewards not in ("none", False)
        is_independent = self.advantage_estimator == "rloo" and self.rloo_baseline == "independent"
        if scales and is_independent and self.num_generations == 2 and self.diversity_coef != 0:
            yield (
                "scale_rewards is not supported with advantage_estimator: rloo, rloo_baseline: independent and "
                "num_generations: 2, whose rewards hardly deviate. Set 3 or more, or scale_rewards: none."
            )


@with_prefix
@dataclass
class AsyncEBFTConfig(EBFTConfig):
    """EBFTConfig with prefetched rollouts: a vLLM server generates them while the previous batch trains."""

    use_vllm: bool = field(default=True, metadata={"help": "Always True: prefetching requires a vLLM server."})
    async_prefetch: bool = field(default=True, metadata={"help": "Always True for this class."})


_ROUNDING = 1e-3  # above 0, of a log-probability


def check_arguments(args: Any) -> None:
    """Change or warn of arguments that have another effect in structured mode."""
    use_one_gpu(args)
    if args.torch_compile:
        args.torch_compile = False
        warnings.warn(rules.compiled(rules.in_python, "structured mode and GRPO"), stacklevel=3)
    load_whole()
    if args.use_vllm and not args.uses_server and getattr(args, "adaptive_max_tokens", False):  # not an option of GRPO
        args.adaptive_max_tokens = False
        warnings.warn("adaptive_max_tokens has no effect with vllm_mode: colocate: TRL limits lengths.", stacklevel=3)


def check_rows(name: str, dataset: Any, args: Any, needs_reference: bool) -> None:
    """Raise DataError for rows without a reference or with turns that would be left out."""
    if isinstance(dataset, dict):
        for key, part in dataset.items():
            check_rows(f"{name}[{key!r}]", part, args, needs_reference)
        return
    for problem in _problems_of_rows(name, dataset, args, needs_reference):
        raise DataError(problem)


def with_references(dataset: Any) -> Any:
    """Rows of TRL's SFTTrainer with the text or message of `completion` in `ground_truth`; others as they are."""
    if isinstance(dataset, dict):
        return {key: with_references(part) for key, part in dataset.items()}
    names = getattr(dataset, "column_names", None) or ()
    if not isinstance(dataset, Dataset) or "completion" not in names or "ground_truth" in names:
        return dataset
    keys = lambda message: {key for key, value in message.items() if value is not None}
    is_text = lambda reply: isinstance(reply, list) and len(reply) == 1 and keys(reply[0]) == {"role", "content"}
    text = lambda reply: reply[0]["content"] if is_text(reply) else reply if isinstance(reply, str) else None
    return dataset.map(lambda row: {"ground_truth": text(row["completion"])}, remove_columns="completion")


def _problems_of_rows(name: str, dataset: Any, args: Any, needs_reference: bool) -> Iterator[str]:
    present = getattr(dataset, "column_names", None) or ()
    if "remaining_turns" in present and args.use_vllm and not args.uses_server:
        yield (
            f"{name} has a column remaining_turns, but vllm_mode: colocate supports single-turn rollouts only. Set "
            "vllm_mode: server or managed, or use a single-turn transform (ebft_chat_multiturn.transform_last_turn)."
        )
    if not isinstance(dataset, Dataset):
        return
    if needs_reference and "ground_truth" not in present:
        yield f"{name} has no column ground_truth or completion, the text of the reference, but {', '.join(present)}."
    texts = dataset["ground_truth"] if needs_reference else ()
    empty = [i for i, text in enumerate(texts) if not isinstance(text, str) or not text.strip()]
    if empty:
        yield f"{name} has {len(empty)} rows whose ground_truth is empty or not text, starting with row {empty[0]}."


def check_interactive(args: Any, reward_funcs: list, trainer_kwargs: dict[str, Any]) -> bool:
    """Whether user code takes part in rollouts. Raises ConfigError or DataError if it cannot with these arguments."""
    given = [name for name in rules.INTERACTIVE if trainer_kwargs.get(name)]
    compares = any(isinstance(func, FeatureMatchingReward) for func in reward_funcs)
    rules.refuse(rules.interactive(given, args.async_prefetch, compares, args.reward_num_workers, rules.in_python))
    for name in ("train_dataset", "eval_dataset") if given not in ([], ["rollout_func"]) else ():
        dataset = trainer_kwargs.get(name)
        if not isinstance(dataset, Dataset) or not len(dataset):
            continue
        if isinstance(dataset[0].get("prompt"), str):
            problem = "text prompts, but the chat template, which presents the tools to the model, needs messages"
        elif any(dataset["remaining_turns"] if "remaining_turns" in dataset.column_names else []):
            problem = "conversations with remaining_turns, but results of tools continue a conversation"
        else:
            continue
        raise DataError(f"{name} has {problem} ({given[0]}). Use a transform that returns one turn of messages.")
    return bool(given)


def checked(rollout_func: Callable[[list[Any], Any], dict[str, Any]]) -> Callable[[list[Any], Any], dict[str, Any]]:
    """Return `rollout_func` with a check of its result, which raises RolloutError.

    The rollouts of all prompts must have equally many entries in each list, and at least one token each.
    """
    name = f"rollout_func {getattr(rollout_func, '__name__', rollout_func)!r}"

    def call(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        count = len(prompts)
        with user_code(f"The {name}", RolloutError):
            found = rollout_func(prompts, trainer)
            for problem in _problems(found, count, trainer.use_vllm):
                raise RolloutError(f"{name} returned {problem}.")
        return found

    return update_wrapper(call, rollout_func)


def _problems(found: dict[str, Any], count: int, use_vllm: bool) -> Iterator[str]:
    """Yield what TRL would pad or pair wrongly in the result of a rollout_func for `count` prompts."""
    ids, logprobs, mask = found["completion_ids"], found["logprobs"], found.get("env_mask")
    if logprobs is None and use_vllm:
        yield "no log-probabilities (logprobs: None), which importance sampling with vLLM requires"
    for name, values in found.items():
        if values is not None and len(values) != count:
            yield f"{len(values)} {name} for {count} prompts (num_generations prompts per row)"
    for index, tokens in enumerate(ids):
        if not tokens or not found["prompt_ids"][index]:
            yield f"an empty prompt or completion (prompt {index})"
        for name, values in (("logprobs", logprobs), ("env_mask", mask)):
            if values is not None and len(values[index]) != len(tokens):
                yield f"{name} that do not have one entry per token of completion_ids (prompt {index})"
        if logprobs is not None and not all(-math.inf < value <= _ROUNDING for value in logprobs[index]):
            yield f"logprobs that are not finite numbers of at most 0 (prompt {index})"
        if mask is not None and not ({*mask[index]} <= {0, 1} and any(mask[index])):
            yield f"env_mask with other values than 0 and 1, or without a sampled token (prompt {index})"
