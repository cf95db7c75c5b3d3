"""Checks of what the trainers of structured mode are given: arguments, models, datasets, and code of the user.

The code is `rollout_func`, `tools` and `environment_factory` of TRL, which takes part in rollouts.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import update_wrapper
from typing import Any

from datasets import Dataset

from ebft.config import rules
from ebft.config.user_functions import user_code
from ebft.errors import DataError, RolloutError
from ebft.models.sharding import load_whole
from ebft.structured.reward import FeatureMatchingReward
from ebft.transformers_internals import use_one_gpu

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
    """Raise DataError for rows without a reference or with turns that would be left out, and for too few rows."""
    if isinstance(dataset, dict):
        for key, part in dataset.items():
            check_rows(f"{name}[{key!r}]", part, args, needs_reference)
        return
    for problem in _problems_of_rows(name, dataset, args, needs_reference):
        raise DataError(problem)


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
        yield f"{name} has no column ground_truth, the reference, but {', '.join(present)}. Rename its column."
    texts = dataset["ground_truth"] if needs_reference else ()
    empty = [i for i, text in enumerate(texts) if not isinstance(text, str) or not text.strip()]
    if empty:
        yield f"{name} has {len(empty)} rows whose ground_truth is empty or not text, starting with row {empty[0]}."
    prompts = args.generation_batch_size // args.num_generations
    if name == "train_dataset" and len(dataset) < prompts:
        yield (
            f"{len(dataset)} prompts are fewer than the {prompts} of one generation batch (generation_batch_size "
            f"{args.generation_batch_size}, by default the completions of one optimizer step, in groups of "
            f"num_generations {args.num_generations}). Add rows, or reduce the batch size."
        )


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
