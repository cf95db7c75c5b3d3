"""Rollouts that the user's code takes part in: `rollout_func`, `tools` and `environment_factory` of TRL."""

from __future__ import annotations

import copy
import inspect
import math
import numbers
from collections.abc import Callable
from contextlib import suppress
from functools import update_wrapper
from itertools import groupby
from types import MethodType
from typing import Any

from datasets import Dataset

from ebft.config import rules
from ebft.config.user_code import named_call, state_kept, user_code
from ebft.data.prompts import RESERVED
from ebft.errors import ConfigError, DataError, RolloutError
from ebft.structured.reward import FeatureMatchingReward
from ebft.structured.rollouts.turns import Rollout

_LISTS = ("prompt_ids", "completion_ids")
_PER_TOKEN = {"logprobs": "log-probabilities", "env_mask": "0 and 1"}  # and what each has for a token
_OF_TRAINER = {"prompt", *RESERVED} - {*_LISTS, "image", "images"}  # arguments of reward functions
_ROUNDING = 1e-3  # above 0, of a log-probability


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


def guarded(given: dict[str, Any]) -> dict[str, Any]:
    """Return the user's code among the arguments of a trainer such that each call is named, and leaves state as it was.

    TRL shows the model what a tool raises. This includes what would otherwise end training, such as sys.exit() in code
    that the model wrote.
    """
    found: dict[str, Any] = {}
    if given.get("rollout_func") is not None:
        found["rollout_func"] = checked(given["rollout_func"])
    if given.get("tools"):
        found["tools"] = [_guarded(tool, f"The tool {_name(tool)}") for tool in given["tools"]]
    factories = given.get("environment_factory")
    if isinstance(factories, dict):
        found["environment_factory"] = {name: _guarded_factory(each) for name, each in factories.items()}
    elif factories:
        found["environment_factory"] = _guarded_factory(factories)
    return found


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", repr(function))


def _guarded_factory(factory: Callable[[], Any]) -> Callable[[], Any]:
    def make() -> Any:
        with user_code(f"The environment_factory {_name(factory)}", RolloutError, sets_up=True):
            environment = factory()
        for name, method in inspect.getmembers(type(environment), inspect.isfunction):
            if not name.startswith("_"):
                call = _guarded(method, f"The environment's {_name(method)}")
                with suppress(AttributeError, TypeError, ValueError):  # of classes with fixed attributes
                    setattr(environment, name, MethodType(call, environment))
        return environment

    return update_wrapper(make, factory, updated=())


def _guarded(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        async def call_later(*args: Any, **kwargs: Any) -> Any:
            with named_call(what, RolloutError, passes=Exception):
                return await function(*args, **kwargs)

        return update_wrapper(call_later, function)

    def call(*args: Any, **kwargs: Any) -> Any:
        with named_call(what, RolloutError, passes=Exception), state_kept(what):
            return function(*args, **kwargs)

    return update_wrapper(call, function)


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
        vocabulary = trainer.model.get_input_embeddings().weight.shape[0]
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


def rollouts_of(
    prompt_ids: list[list[int]],
    completion_ids: list[list[int]],
    sampled: list[list[int]] | None,
    logps: list[list[float]] | None,
) -> list[Rollout]:
    """Return the result of TRL's generation as rollouts; `sampled` is 1 for sampled tokens, None if all are.

    Adjacent sampled tokens are one reply.
    """
    rollouts = []
    for index, (prompt, ids) in enumerate(zip(prompt_ids, completion_ids, strict=True)):
        mask = [1] * len(ids) if sampled is None else sampled[index]
        runs = [(key, [token for _, token in run]) for key, run in groupby(zip(mask, ids), key=lambda pair: pair[0])]
        replies = [tokens for key, tokens in runs if key]
        rollouts.append(Rollout(prompt, ids, mask, None if logps is None else logps[index], replies))
    return rollouts
