"""Rules shared by config files and by arguments created in Python.

A rule yields error messages. `key` returns the name of an option as the user writes it: `in_python` as a
trainer argument, `in_config` as a config key.
"""

import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from pydantic import ValidationError

from ebft.config.options import MIN_TEMPERATURE, EBFTSection
from ebft.config.section import option_names, section_of_options
from ebft.config.trl import TRLSection
from ebft.config.validation_errors import raise_config_error
from ebft.errors import ConfigError, warn

Key = Callable[[str], str]

# Trainer argument -> config key, where the names differ apart from the section.
_IN_CONFIG = {
    "per_device_train_batch_size": "micro_batch_size",
    "vllm_structured_outputs_regex": "trl.vllm_guided_decoding_regex",
}
# Arguments of trainers with which the user's code takes part in rollouts.
INTERACTIVE = ("tools", "environment_factory", "rollout_func")


def in_python(name: str) -> str:
    """The name of a trainer argument, unchanged."""
    return name


def in_config(name: str) -> str:
    """The config key that sets the trainer argument `name`."""
    section = "ebft." if name in EBFTSection.model_fields else "trl." if name in TRLSection.model_fields else ""
    return _IN_CONFIG.get(name, f"{section}{name}")


def refuse(*found: Iterator[str]) -> None:
    """Raise ConfigError with the first message of rules."""
    for message in chain(*found):
        raise ConfigError(message)


def prefetch(async_prefetch: bool, uses_server: bool, key: Key) -> Iterator[str]:
    if async_prefetch and not uses_server:
        yield f"{key('async_prefetch')} requires a vLLM server. Set {key('use_vllm')}: true, or remove it."


def interactive(
    given: list[str], async_prefetch: bool, compares_features: bool, workers: int, key: Key
) -> Iterator[str]:
    """`given` are the names of INTERACTIVE that are set, `workers` is reward_num_workers."""
    name = key(given[0]) if given else ""
    if "rollout_func" in given and len(given) > 1:
        yield f"{name} has no effect with {key('rollout_func')}, which generates all rollouts. Remove one."
    if given and async_prefetch:
        yield f"{name} is called between the steps, which excludes {key('async_prefetch')}. Remove one."
    if given and compares_features and given != ["rollout_func"]:
        yield f"{name} is incompatible with the feature-matching reward. Use rl: grpo with other rewards."
    if "environment_factory" in given and workers > 1:
        yield f"{name} is incompatible with {key('reward_num_workers')}: {workers}. Remove one."


def logged_rollouts(log_rollouts: str, log_completions: bool | None, key: Key) -> Iterator[str]:
    if log_rollouts == "none" and log_completions:
        yield f"{key('log_rollouts')}: none contradicts {key('log_completions')}: true. Remove one."


def groups(batch_size: int, steps: int, num_generations: int, key: Key, step: str) -> Iterator[str]:
    """`batch_size` completions in each of `steps` micro-batches of a process, whose number the key `step` sets."""
    completions = batch_size * steps
    if completions % num_generations == 0:
        return
    sizes = [size for size in range(2, completions + 1) if completions % size == 0]
    nearest = sorted(sorted(sizes, key=lambda size: abs(size - num_generations))[:3])
    fits = f"{key('num_generations')} to {' or '.join(map(str, nearest))}, or " if sizes else ""
    yield (
        f"{key('num_generations')}: {num_generations} does not divide {completions}, the number of completions per "
        f"process and generation step ({key('per_device_train_batch_size')} * gradient_accumulation_steps, unless "
        f"{key('generation_batch_size')} is set). All completions of a prompt must be in the same step. Set "
        f"{fits}{step} to {num_generations // math.gcd(batch_size, num_generations)} or a multiple of it."
    )


def regex(pattern: str | None, use_vllm: bool, key: Key) -> Iterator[str]:
    if pattern is not None and not use_vllm:
        yield f"{key('vllm_structured_outputs_regex')} requires vLLM. Set {key('use_vllm')}: true, or remove it."


def aggregation(multi_objective: str | None, estimator: str, key: Key) -> Iterator[str]:
    if multi_objective not in (None, "sum_then_normalize") and estimator != "group_norm":
        own, other = key("multi_objective_aggregation"), key("advantage_estimator")
        yield f"{own}: {multi_objective} excludes {other}: {estimator}. Set {other}: group_norm, or remove {own}."


def full_weights(uses_server: bool, has_adapter: bool, has_cuda: bool, key: Key) -> Iterator[str]:
    if uses_server and not has_adapter and not has_cuda:
        yield "Full fine-tuning with a vLLM server requires CUDA. Train an adapter (peft_config in Python)."


def feature_device(device: str | None, has_adapter: bool, key: Key) -> Iterator[str]:
    if device is not None and has_adapter:
        yield f"{key('feature_device')}: {device} has no effect with an adapter. Remove it."


def passes(options: Any, gradient_checkpointing: bool, is_sharded: bool, key: Key) -> Iterator[str]:
    """`options` of strided mode; `is_sharded`: in a run with FSDP2 or DeepSpeed ZeRO-3."""
    saving = {
        key("gradient_checkpointing"): gradient_checkpointing,
        key("rollout_tokens_per_pass"): options.rollout_tokens_per_pass is not None,
        f"{key('disable_dropout')}: false": not options.disable_dropout,
    }
    if options.single_pass and any(saving.values()):
        yield (
            f"{key('single_pass')} is incompatible with {', '.join(name for name in saving if saving[name])}, which "
            "requires a separate forward pass for the loss. Remove one."
        )
    reasons = {
        "rollout_tokens_per_pass": "whose processes must make equally many passes: documents of different lengths "
        "would leave them waiting for each other. Remove it, or use DDP or ZeRO-2.",
        "single_pass": "which gather the weights again for each pass. Remove it.",
    }
    for name, reason in reasons.items():
        if is_sharded and getattr(options, name):
            yield f"{key(name)} is not supported with FSDP2 and DeepSpeed ZeRO-3, {reason}"


def compiled(key: Key, mode: str = "strided mode") -> str:
    return f"{key('torch_compile')}: true is set to false in {mode}: the attention layout changes in every batch."


NEFTUNE = "embedding noise during training would be inconsistent with the rollouts, which are sampled without it"


def options_from(options: type, given: dict[str, Any]) -> Any:
    """Build `options` from `given`, with defaults for the rest. Raises ConfigError for unknown or invalid options."""
    section = section_of_options(options)
    try:
        return section.model_validate(given)
    except ValidationError as error:
        raise_config_error(error, section)


def validate_options(options: type, obj: Any) -> None:
    """Check the attributes of `obj` against types and bounds. Raises ConfigError that names the invalid options. Values
    that pydantic converts (an int for a float, a tuple for a list) are written back to `obj`."""
    checked = options_from(options, {name: getattr(obj, name) for name in option_names(options)})
    for name in option_names(options):
        setattr(obj, name, getattr(checked, name))


def resolve_single_sample(options: Any) -> None:
    """With one sample per anchor, use `reinforce` without diversity and whitening, and warn. There is no baseline,
    there are no pairs, and whitening by a single sample gives every sample the same reward."""
    if options.n_samples_per_prompt > 1:
        return
    changes = []
    if options.advantage_estimator != "reinforce":
        options.advantage_estimator = "reinforce"
        changes.append("advantage_estimator is set to reinforce")
    if options.diversity_coef != 0:
        options.diversity_coef = 0.0
        changes.append("diversity_coef is set to 0")
    if options.use_whitening:
        options.use_whitening = False
        changes.append("use_whitening is set to false")
    if changes:
        reason = "n_samples_per_prompt: 1 provides no other sample for a baseline, the diversity term or whitening"
        warn(f"{reason}: {', '.join(changes)}.")


def follow_samples(ebft: EBFTSection, trl: TRLSection) -> None:
    """Take `num_generations` from `ebft.n_samples_per_prompt` unless it is set, so that one config fits all methods."""
    given = "n_samples_per_prompt" in ebft.model_fields_set and "num_generations" not in trl.model_fields_set
    if given and ebft.n_samples_per_prompt > 1:
        trl.num_generations = ebft.n_samples_per_prompt


def samples_in_effect(ebft: EBFTSection, trl: TRLSection) -> set[str]:
    """The key `n_samples_per_prompt` if full completions of a prompt are as many."""
    return {"n_samples_per_prompt"} if ebft.n_samples_per_prompt == trl.num_generations else set()


def warn_of_reward(options: EBFTSection) -> None:
    """One warning for each setting of the feature-matching reward in `ebft:` without effect."""
    if options.alignment_coef == 0 and options.diversity_coef == 0:
        warn("ebft.alignment_coef: 0 and ebft.diversity_coef: 0: the feature-matching reward is always 0.")
    if "whitening_space" in options.model_fields_set and not options.use_whitening:
        warn("ebft.whitening_space: no effect without ebft.use_whitening: true.")


def select_by_cfm_loss(args: Any) -> None:
    """Let a trainer's arguments select checkpoints, and lower rates, by the held-out CFM loss if they name no metric.
    transformers' default is a loss that EBFT's evaluations do not have, or the policy's loss, which does not fall."""
    selects = args.load_best_model_at_end or args.lr_scheduler_type == "reduce_lr_on_plateau"
    if selects and args.metric_for_best_model is None:
        args.metric_for_best_model = "cfm_loss"
        args.greater_is_better = False if args.greater_is_better is None else args.greater_is_better


def untrainable(options: Any) -> Iterator[str]:
    """Options that are valid for evaluation but give no training signal."""
    if 0 < options.temperature < MIN_TEMPERATURE:
        yield f"temperature: {options.temperature} is too small. Set it to at least {MIN_TEMPERATURE}."
    if options.temperature == 0:
        yield "temperature: 0 is greedy decoding: all rollouts are identical. Set temperature above 0."
    has_reward = options.alignment_coef > 0 or options.diversity_coef > 0
    if options.ce_coef == 0 and not (options.rl_coef > 0 and has_reward):
        zero = "rl_coef: 0" if options.rl_coef == 0 else "alignment_coef: 0 with diversity_coef: 0"
        yield f"{zero} and ce_coef: 0: the loss is always 0, so nothing is trained. Set one above 0."
