"""Checks of the arguments, models and datasets of the trainers of structured mode."""

from __future__ import annotations

import warnings
from typing import Any

from datasets import Dataset
from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled

from ebft.config import rules
from ebft.data.prompts import RESERVED
from ebft.errors import ConfigError, DataError, ModelError
from ebft.models.causal_lm import unwrap_adapter


def check_arguments(args: Any, config_class: type) -> None:
    """Raise ConfigError for arguments that are not supported in structured mode."""
    if not isinstance(args, config_class):
        raise ConfigError(f"args must be an instance of {config_class.__name__}, got {type(args).__name__}")
    if args.torch_compile:
        args.torch_compile = False
        warnings.warn(rules.compiled(rules.in_python, "structured mode and GRPO"), stacklevel=3)
    if is_deepspeed_zero3_enabled():
        raise ConfigError(
            "DeepSpeed ZeRO-3 is not supported in structured mode: it partitions the parameters while the model is "
            "loaded, before it is copied and its passes are checked. Use FSDP2, ZeRO-2 or DDP."
        )
    if args.use_transformers_continuous_batching:
        raise ConfigError("use_transformers_continuous_batching is not supported. Remove it, or set use_vllm: true.")
    if args.use_vllm and not args.uses_server and getattr(args, "adaptive_max_tokens", False):  # not an option of GRPO
        args.adaptive_max_tokens = False
        warnings.warn(
            "adaptive_max_tokens is set to false: vllm_mode: colocate supports only a single length limit for all "
            "completions.",
            stacklevel=3,
        )


def check_model(model: nn.Module, args: Any) -> None:
    """Raise ModelError for models whose completions TRL cannot score and adapters that a server would not find."""
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


def check_reference_model(model: nn.Module, reference: nn.Module | None) -> None:
    """Raise ModelError if the reference model (beta > 0, no adapter) and the policy have different vocabularies."""
    if reference is None:
        return
    ours, theirs = (m.get_input_embeddings().weight.shape[0] for m in (model, reference))
    if ours != theirs:
        raise ModelError(
            f"beta > 0 compares the policy with its saved base model, but the base model has {theirs} token embeddings "
            f"and the policy {ours}, because special_tokens added tokens. Save a base model with these tokens, train "
            "an adapter, or set beta: 0."
        )


def check_rows(name: str, dataset: Any, args: Any, columns: tuple[str, ...] = ("prompt",)) -> None:
    """Raise DataError for missing or reserved columns, rows without a reference, or too few rows."""
    if isinstance(dataset, dict):
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
