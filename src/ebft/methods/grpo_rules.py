"""Checks of a config for full completions of prompts: what cannot be trained, and keys without effect."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ebft.config import rules
from ebft.config.axolotl import Ignored
from ebft.config.user_code import call_problem, find_function
from ebft.errors import ConfigError
from ebft.models.files import reward_problem
from ebft.nemo_gym.keys import ENVIRONMENT, VERIFY

if TYPE_CHECKING:
    from datasets import Dataset

    from ebft.methods.method import MethodConfig

FEATURE_MATCHING = "feature_matching"
# Keys of `trl:` without effect: the values that give no warning, and the reason.
_WITHOUT_EFFECT = {
    "use_data_producer": Ignored((None, False), "generation and prefetching do not use a data producer"),
}


def warn_of_idle_keys(config: MethodConfig) -> None:
    """One warning for each key that has no effect on full completions."""
    for key, (harmless, reason) in _WITHOUT_EFFECT.items():
        if getattr(config.trl, key) not in harmless:
            warnings.warn(f"trl.{key} has no effect: {reason}.", stacklevel=2)
    given = config.trl.model_fields_set
    if not config.trl.use_vllm:
        idle = sorted(key for key in given if key.startswith("vllm_") and key != "vllm_guided_decoding_regex")
        if idle:
            keys = ", ".join(f"trl.{key}" for key in idle)
            warnings.warn(f"{keys}: no effect without use_vllm: true.", stacklevel=2)
    if "streaming_min_groups" in given and not config.trl.streaming_partial_batch:
        warnings.warn("trl.streaming_min_groups has no effect without streaming_partial_batch: true.", stacklevel=2)
    if config.trl.streaming_partial_batch and config.trl.reward_num_workers > 1:
        warnings.warn(
            "trl.streaming_partial_batch has no effect with reward_num_workers above 1, which already calls reward "
            "functions for one prompt at a time.",
            stacklevel=2,
        )
    if "reward_timeout" in given and config.trl.reward_num_workers == 1:
        warnings.warn(
            "trl.reward_timeout has no effect without reward_num_workers above 1: the training process cannot end a "
            "call that it makes itself, and only reports one that takes longer than a minute.",
            stacklevel=2,
        )
    if "prefetch_depth" in given and not config.trl.async_prefetch:
        warnings.warn("trl.prefetch_depth has no effect without async_prefetch: true.", stacklevel=2)
    for key in ("train_on_inputs", "sample_packing"):
        if getattr(config, key):
            warnings.warn(f"{key}: true has no effect on full completions of prompts.", stacklevel=2)
    if config.uses_server and config.adapter is not None and config.trl.vllm_lora_sync is False:
        warnings.warn(
            "trl.vllm_lora_sync: false has no effect: adapters are always sent to vLLM unmerged, with the same result.",
            stacklevel=2,
        )
    if "vllm" in config.model_fields_set and not config.trl.use_vllm:
        warnings.warn("vllm: has no effect without trl.use_vllm: true.", stacklevel=2)


def batches(config: MethodConfig) -> Iterator[str]:
    """Problems with batches, which must consist of whole groups."""
    trl, samples = config.trl, config.micro_batch_size * config.gradient_accumulation_steps
    found = rules.groups(samples, trl.num_generations, rules.in_config)
    if trl.generation_batch_size is None and found:
        yield found
    if trl.generation_batch_size is not None and trl.generation_batch_size % trl.num_generations:
        yield (
            f"trl.generation_batch_size: {trl.generation_batch_size} is not a multiple of trl.num_generations: "
            f"{trl.num_generations}. Change one of them."
        )
    per_process = config.eval_batch_size
    if per_process is not None and per_process % trl.num_generations:
        yield (
            f"eval_batch_size: {per_process} is not a multiple of trl.num_generations: {trl.num_generations}. Change "
            "one of them."
        )


def rewards(config: MethodConfig, names: list[str], always: tuple[str, ...]) -> Iterator[str]:
    """Problems with the rewards `names`, of which the method includes `always`."""
    funcs, weights = config.trl.reward_funcs or [], config.trl.reward_weights
    if not names and not config.trl.environment_factory:
        yield (
            "rl: grpo needs trl.reward_funcs: import paths such as rewards.accuracy, folders or Hub ids of reward "
            "models, or feature_matching."
        )
    if len(set(names)) < len(names):
        hint = " With rl: ebft, feature_matching is always included." if always else ""
        yield f"trl.reward_funcs: {', '.join(names)} contains a duplicate. Remove it.{hint}"
    for name in funcs:
        if "/" in name:
            problem = reward_problem(name)
            if problem is not None:
                yield problem
        elif name not in (FEATURE_MATCHING, VERIFY, ENVIRONMENT):
            find_function("trl.reward_funcs", name)
    if weights is not None and len(weights) != len(names):
        hint = " The weight of an environment's reward is always 1." if environments(config) else ""
        yield (
            f"trl.reward_weights has {len(weights)} weights for {len(names)} rewards"
            f"{': ' if names else ''}{', '.join(names)}. Set one weight per reward function.{hint}"
        )


def check_reward_columns(config: MethodConfig, rows: Dataset) -> None:
    """Raise ConfigError for a reward function that cannot be called with the columns of the rows."""
    columns = [name for name in rows.column_names or () if name not in ("prompt", "completion", "completion_ids")]
    always = ["prompts", "completions", "completion_ids"]
    if config.trl.reward_num_workers == 1:
        always += ["trainer_state", "log_extra", "log_metric"]
        always += ["environments"] if config.trl.environment_factory else []
    for name in config.trl.reward_funcs or []:
        if "/" in name or name in (FEATURE_MATCHING, VERIFY, ENVIRONMENT):
            continue
        given = dict.fromkeys([*always, *columns])
        problem = call_problem(find_function("trl.reward_funcs", name), f"{name}({', '.join(given)})", **given)
        if problem is not None:
            raise ConfigError(
                f"trl.reward_funcs: {name} {problem}. All arguments are passed by keyword: accept those that it does "
                "not read with **kwargs, and keep the columns that it reads in the transform."
            )


def check_reward_templates(config: MethodConfig, rows: Dataset) -> None:
    """Raise ConfigError for messages that are to be scored by a reward model without a chat template."""
    models = [name for name in config.trl.reward_funcs or [] if "/" in name]
    if not models or "prompt" not in (rows.column_names or ()) or isinstance(rows[0]["prompt"], str):
        return
    from ebft.structured.reward_funcs import reward_tokenizer

    for name in models:
        if reward_tokenizer(name).chat_template is None:
            raise ConfigError(
                f"trl.reward_funcs: {name} has no chat template, but the prompts are messages, which it would have to "
                "render. Save its tokenizer with the chat_template that it was trained with, or use a transform that "
                "returns text prompts."
            )


def rollouts(config: MethodConfig) -> Iterator[str]:
    """Problems with what generates rollouts."""
    trl = config.trl
    shared = (
        rules.prefetch(trl.async_prefetch, config.uses_server, rules.in_config),
        rules.regex(trl.vllm_guided_decoding_regex, trl.use_vllm, rules.in_config),
    )
    yield from filter(None, shared)
    if trl.sync_ref_model and (not trl.beta or config.adapter is not None):
        yield (
            "trl.sync_ref_model requires a reference model, which is only used with trl.beta above 0 and without an "
            "adapter. Remove it."
        )
    if trl.use_vllm and not config.uses_server and find_spec("vllm") is None:
        yield (
            "trl.vllm_mode: colocate needs vLLM in this environment: pip install 'ebft[vllm]'. Or set vllm_mode: "
            "server or managed, which can use vLLM from a separate environment (vllm.python)."
        )
    if config.uses_server and config.adapter is not None and config.lora_modules_to_save:
        yield (
            "lora_modules_to_save is not supported with vLLM, which cannot load adapters with full modules. Remove it, "
            "or set trl.use_vllm: false."
        )


def interaction(config: MethodConfig, compares: bool) -> Iterator[str]:
    """Problems with tools and environments; `compares`: whether a reward compares features."""
    trl = config.trl
    given = [name for name in rules.INTERACTIVE if getattr(trl, name)]
    found = rules.interactive(given, trl.async_prefetch, compares, trl.reward_num_workers, rules.in_config)
    if found:
        yield found
    if given and config.fsdp and not config.uses_server:
        yield (
            f"trl.{given[0]} is incompatible with fsdp, whose processes must sample equally many turns. Set "
            "trl.use_vllm: true with vllm_mode: server or managed, or remove fsdp."
        )
    for name in given:
        found = load_named(name, getattr(trl, name))
        if name == "rollout_func":
            yield from filter(None, (rules.rollout_func(found, rules.in_config),))
        elif name == "environment_factory":
            for factory in found.values() if isinstance(found, dict) else [found]:
                problem = call_problem(factory, f"{getattr(factory, '__name__', factory)}()")
                if problem is not None:
                    yield f"trl.environment_factory {problem}. It is called without arguments."
    if trl.max_tool_calling_iterations is not None and not (trl.tools or trl.environment_factory):
        yield "trl.max_tool_calling_iterations has no effect without tools or environment_factory. Remove it."


def processes(config: MethodConfig) -> Iterator[str]:
    """Problems with several processes, and with the order of rows."""
    if config.group_by_length:
        yield "group_by_length is incompatible with grouped completions. Remove it."


def load_named(key: str, names: str | list[str] | dict[str, str]) -> Any:
    """Return what the import paths of `trl.KEY` name, in the same structure. Raises ConfigError."""
    find = lambda name: find_function(f"trl.{key}", name)
    if isinstance(names, dict):
        return {environment: find(name) for environment, name in names.items()}
    return find(names) if isinstance(names, str) else [find(name) for name in names]


def load_interactive(config: MethodConfig) -> dict[str, Any]:
    """Return the tools and environments of a config by the trainer's argument."""
    return {name: load_named(name, found) for name in rules.INTERACTIVE if (found := getattr(config.trl, name))}


def environments(config: MethodConfig) -> list[str]:
    """Return the import paths of `trl.environment_factory`."""
    found = config.trl.environment_factory
    return list(found.values()) if isinstance(found, dict) else [found] if found else []
