"""Checks of what the trainers of structured mode are given: arguments, models, datasets, and code of the user.

The code is `rollout_func`, `tools` and `environment_factory` of TRL, which takes part in rollouts.
"""

from __future__ import annotations

import copy
import math
import numbers
import warnings
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from datasets import Dataset
from torch import nn

from ebft.config import rules
from ebft.config.user_code import user_code
from ebft.data.prompts import RESERVED
from ebft.errors import ConfigError, DataError, ModelError, RolloutError
from ebft.models.causal_lm import unwrap_adapter
from ebft.models.sharding import check_whole, load_whole, whole_shape
from ebft.structured.reward import FeatureMatchingReward
from ebft.transformers_internals import use_one_gpu

_LISTS = ("prompt_ids", "completion_ids")
_PER_TOKEN = {"logprobs": "log-probabilities", "env_mask": "0 and 1"}  # and what each has for a token
_OF_TRAINER = {"prompt", *RESERVED} - {*_LISTS, "image", "images"}  # arguments of reward functions
_ROUNDING = 1e-3  # above 0, of a log-probability


def check_arguments(args: Any, config_class: type) -> None:
    """Raise ConfigError for arguments that are not supported in structured mode."""
    if not isinstance(args, config_class):
        raise ConfigError(f"args must be an instance of {config_class.__name__}, got {type(args).__name__}")
    use_one_gpu(args)
    if args.neftune_noise_alpha is not None:
        raise ConfigError(f"neftune_noise_alpha is not supported: {rules.NEFTUNE}. Remove it.")
    if args.label_smoothing_factor:
        raise ConfigError("label_smoothing_factor is not used in the policy loss. Remove it.")
    if args.torch_compile:
        args.torch_compile = False
        warnings.warn(rules.compiled(rules.in_python, "structured mode and GRPO"), stacklevel=3)
    load_whole()
    if args.use_transformers_continuous_batching:
        raise ConfigError("use_transformers_continuous_batching is not supported. Remove it, or set use_vllm: true.")
    if args.deepspeed_plugin is not None and not args.ds3_gather_for_generation:
        raise ConfigError("ds3_gather_for_generation: false is not supported: completions may have different lengths.")
    if args.use_vllm and not args.uses_server and getattr(args, "adaptive_max_tokens", False):  # not an option of GRPO
        args.adaptive_max_tokens = False
        warnings.warn("adaptive_max_tokens has no effect with vllm_mode: colocate: TRL limits lengths.", stacklevel=3)


def check_model(model: nn.Module, args: Any) -> None:
    """Raise ModelError for models whose completions TRL cannot score and adapters that a server would not find."""
    check_whole(model)
    if args.uses_server and hasattr(model, "disable_adapter") and model.active_adapter != "default":
        raise ModelError(
            f"the adapter sent to vLLM must have PEFT's default name 'default', got {model.active_adapter!r}. Do not "
            "set adapter_name when creating it."
        )
    causal_lm = unwrap_adapter(model)
    if getattr(causal_lm, "base_model", causal_lm) is causal_lm:
        raise ModelError(
            f"{type(causal_lm).__name__} has no decoder under its base_model_prefix "
            f"({causal_lm.base_model_prefix!r}), which TRL's GRPOTrainer requires. Use ebft.mode: strided for this "
            "model."
        )


def check_tokenizer(tokenizer: Any) -> None:
    """Raise ModelError if the tokenizer has no token that can be used for padding."""
    if tokenizer is not None and tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        raise ModelError(
            "the tokenizer has neither a padding nor an end-of-sequence token, but batches are padded. Set its "
            "pad_token (in a config: special_tokens.pad_token)."
        )


def check_reward_funcs(reward_funcs: Any) -> None:
    """Raise ConfigError for rewards that are neither functions nor models."""
    if reward_funcs is None:
        return
    for func in reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]:
        if not callable(func) and not isinstance(func, str):
            raise ConfigError(
                f"reward_funcs: invalid value {func!r:.80} of type {type(func).__name__}; expected a function, a "
                "reward model or its name, or a list of them."
            )


def check_reward_templates(reward_funcs: list[Any], tokenizers: list[Any], dataset: Any) -> None:
    """Raise ModelError for messages that are to be scored by a reward model whose tokenizer has no chat template."""
    if not isinstance(dataset, Dataset) or not len(dataset) or not isinstance(dataset[0].get("prompt"), list):
        return
    for model, tokenizer in zip(reward_funcs, tokenizers):
        if isinstance(model, nn.Module) and tokenizer.chat_template is None:
            raise ModelError(
                f"the reward model {model.config.name_or_path} has no chat template, but the prompts are messages. Set "
                "the chat_template of its tokenizer (reward_processing_classes), or use text prompts."
            )


def check_rows(name: str, dataset: Any, args: Any, columns: tuple[str, ...] = ("prompt",)) -> None:
    """Raise DataError for missing or reserved columns, rows without a reference, or too few rows."""
    if isinstance(dataset, dict):
        rules.check_parts(name, dataset)
        for key, part in dataset.items():
            check_rows(f"{name}[{key!r}]", part, args, columns)
        return
    if isinstance(dataset, (list, tuple)):
        raise DataError(
            f"{name} must be a datasets.Dataset, got a {type(dataset).__name__}. Use datasets.Dataset.from_list(rows)."
        )
    present = getattr(dataset, "column_names", None)
    if present is None:
        return
    missing = [column for column in columns if column not in present]
    if missing:
        raise DataError(
            f"{name} has the columns {', '.join(present)}, but not the required {' and '.join(missing)}: prompt (text "
            "or messages), and ground_truth (the reference) for feature matching."
        )
    reserved = [column for column in RESERVED if column in present]
    if reserved:
        raise DataError(
            f"{name} has a column {reserved[0]!r}, which is the name of an argument of reward functions. Rename it."
        )
    if isinstance(dataset, Dataset) and not len(dataset):
        raise DataError(f"{name} has no rows.")
    if "ground_truth" in columns and isinstance(dataset, Dataset):
        empty = [i for i, text in enumerate(dataset["ground_truth"]) if not isinstance(text, str) or not text.strip()]
        if empty:
            raise DataError(
                f"{name} has {len(empty)} rows without a reference (ground_truth is empty or not text), starting with "
                f"row {empty[0]}. Remove them."
            )
    prompts = args.generation_batch_size // args.num_generations
    if name == "train_dataset" and isinstance(dataset, Dataset) and len(dataset) < prompts:
        raise DataError(
            f"{len(dataset)} prompts are fewer than the {prompts} of one generation batch (generation_batch_size "
            f"{args.generation_batch_size}, by default the completions of one optimizer step, in groups of "
            f"num_generations {args.num_generations}). Add rows, or reduce gradient_accumulation_steps or the batch "
            "size."
        )
    if "remaining_turns" in present and args.use_vllm and not args.uses_server:
        raise DataError(
            f"{name} has a column remaining_turns, but vllm_mode: colocate supports single-turn rollouts only. Set "
            "vllm_mode: server or managed, set use_vllm: false, or use a single-turn transform "
            "(ebft_chat_multiturn.transform_last_turn)."
        )


def check_interactive(args: Any, reward_funcs: Any, trainer_kwargs: dict[str, Any]) -> bool:
    """Whether user code takes part in rollouts. Raises ConfigError or DataError if it cannot with these arguments."""
    given = [name for name in rules.INTERACTIVE if trainer_kwargs.get(name)]
    funcs = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    compares = any(isinstance(func, FeatureMatchingReward) for func in funcs)
    found = rules.interactive(given, args.async_prefetch, compares, args.reward_num_workers, rules.in_python)
    if found:
        raise ConfigError(found)
    factories = trainer_kwargs.get("environment_factory")
    if factories:
        by_name = factories if isinstance(factories, dict) else {None: factories}
        if not reward_funcs and not any(hasattr(factory, "get_reward") for factory in by_name.values()):
            raise ConfigError(
                "there is no reward: the environments define no get_reward(), and no reward_funcs are given. Add one "
                "of them."
            )
        for name in ("train_dataset", "eval_dataset") if isinstance(factories, dict) else ():
            _check_environments(name, trainer_kwargs.get(name), list(by_name))
    if given not in ([], ["rollout_func"]):
        for name in ("train_dataset", "eval_dataset"):
            _check_messages(name, trainer_kwargs.get(name), given[0])
    return bool(given)


def _check_messages(name: str, dataset: Any, option: str) -> None:
    if not isinstance(dataset, Dataset) or not len(dataset):
        return
    if "prompt" in dataset.column_names and isinstance(dataset[0]["prompt"], str):
        raise DataError(
            f"{name} has text prompts, but {option} needs messages, since the chat template presents the tools to the "
            "model. Use a transform that returns messages."
        )
    if any(dataset["remaining_turns"] if "remaining_turns" in dataset.column_names else []):
        raise DataError(
            f"{name} has conversations with remaining_turns, but with {option} the results of tools continue a "
            "conversation. Use a single-turn transform."
        )


def _check_environments(name: str, dataset: Any, known: list[str]) -> None:
    if not isinstance(dataset, Dataset):
        return
    if "environment" not in dataset.column_names:
        raise DataError(
            f"{name} has no column environment, which selects the environment of each row: {', '.join(known)}. Keep it "
            "in the transform."
        )
    unknown = sorted({repr(value) for value in dataset["environment"]} - {repr(value) for value in known})
    if unknown:
        raise DataError(f"{name}: unknown environment {unknown[0]}. environment_factory has {', '.join(known)}.")


def checked(rollout_func: Callable[[list[Any], Any], dict[str, Any]]) -> Callable[[list[Any], Any], dict[str, Any]]:
    """Return `rollout_func` with a check of its result, which raises RolloutError.

    The rollouts of all prompts must have equally many entries in each list, and at least one token each. Raises
    ConfigError for a function with other arguments.
    """
    problem = rules.rollout_func(rollout_func, rules.in_python)
    if problem is not None:
        raise ConfigError(problem)

    def call(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        with user_code(f"The rollout_func {getattr(rollout_func, '__name__', rollout_func)!r}", RolloutError):
            found = rollout_func(copy.deepcopy(prompts), trainer)
        vocabulary = whole_shape(trainer.model.get_input_embeddings().weight)[0]
        problem = _problem(found, len(prompts), trainer.use_vllm, vocabulary)
        if problem:
            raise RolloutError(f"rollout_func {getattr(rollout_func, '__name__', rollout_func)!r} returned {problem}.")
        return found

    return update_wrapper(call, rollout_func)


def _problem(found: Any, count: int, use_vllm: bool, vocabulary: int) -> str | None:
    """Return what is wrong with the result of a rollout_func for `count` prompts, or None."""
    if not isinstance(found, dict):
        return f"a {type(found).__name__} instead of a dict"
    missing = [name for name in (*_LISTS, "logprobs") if name not in found]
    if missing:
        return f"no {' and no '.join(missing)}"
    if found["logprobs"] is None and use_vllm:
        return "no log-probabilities (logprobs: None), which importance sampling with vLLM requires"
    for name in _LISTS:
        if not isinstance(found[name], list):
            return f"{name} of type {type(found[name]).__name__} instead of a list"
        if len(found[name]) != count:
            return f"{len(found[name])} {name} for {count} prompts (num_generations prompts per row)"
    for name, values in found.items():
        if not isinstance(name, str):
            return f"the key {name!r}; keys are names of columns for reward functions, so they must be strings"
        if name in _OF_TRAINER:
            return f"{name}, which reward functions get from the trainer. Rename this key"
        if name not in (*_LISTS, *_PER_TOKEN) and (not isinstance(values, list) or len(values) != count):
            return f"{name} that is not a list with one entry per prompt"
    for index, ids in enumerate([*found["prompt_ids"], *found["completion_ids"]]):
        if not isinstance(ids, list) or not all(_is_token(token, vocabulary) for token in ids):
            return f"{_LISTS[index // count]} that are not lists of token ids of the model (prompt {index % count})"
    if not all(found["prompt_ids"]):
        return f"prompt_ids with an empty prompt (prompt {found['prompt_ids'].index([])})"
    for index, ids in enumerate(found["completion_ids"]):
        if not ids:
            return f"an empty completion for prompt {index}"
    return next((problem for name in _PER_TOKEN if (problem := _problem_per_token(found, name))), None)


def _is_token(value: Any, vocabulary: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocabulary


def _problem_per_token(found: dict[str, Any], name: str) -> str | None:
    """Return what is wrong with the log-probabilities or the mask of completions, or None."""
    values, completions = found.get(name), found["completion_ids"]
    if values is None:
        return None
    expected = f"a list with one list of {_PER_TOKEN[name]} per prompt"
    if not isinstance(values, list) or len(values) != len(completions):
        given = f"of {len(values)} entries" if isinstance(values, list) else f"of type {type(values).__name__}"
        return f"{name} {given} instead of {expected} ({len(completions)} prompts)"
    for index, (of_tokens, ids) in enumerate(zip(values, completions)):
        if not isinstance(of_tokens, list):
            return f"{name} with an entry of type {type(of_tokens).__name__} (prompt {index}) instead of {expected}"
        if len(of_tokens) != len(ids):
            return f"{name} that do not have one entry per token of completion_ids (prompt {index})"
        if name == "logprobs":
            wrong = [value for value in of_tokens if not _is_logprob(value)]
            if wrong:
                return f"logprobs with {wrong[0]!r:.80} (prompt {index}); they must be finite numbers of at most 0"
        elif not all(isinstance(value, numbers.Real) and value in (0, 1) for value in of_tokens):
            return f"env_mask with other values than 0 and 1 (prompt {index})"
        elif not any(of_tokens):
            return f"a completion without a sampled token (env_mask of prompt {index} is 0)"
    return None


def _is_logprob(value: Any) -> bool:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value <= _ROUNDING
