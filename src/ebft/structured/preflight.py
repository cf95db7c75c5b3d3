"""What structured mode's trainers check before they load or start anything: arguments and rows."""

from __future__ import annotations

import warnings
from typing import Any

from datasets import Dataset
from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled

from ebft.errors import ConfigError, DataError, ModelError
from ebft.models.causal_lm import unwrap_adapter

# Columns that TRL hands to reward functions itself.
RESERVED_COLUMNS = (
    "completion",
    "completions",
    "completion_ids",
    "prompts",
    "trainer_state",
    "log_extra",
    "log_metric",
)


def check_arguments(args: Any, config_class: type, trainer_kwargs: dict[str, Any]) -> None:
    """Refuse arguments that would have no effect here, or the wrong one."""
    if not isinstance(args, config_class):
        raise ConfigError(f"args must be a {config_class.__name__}, got {type(args).__name__}")
    for name in ("rollout_func", "tools", "environment_factory"):
        if trainer_kwargs.get(name) is not None:
            raise ConfigError(
                f"{name} makes rollouts of its own, and this trainer has its own already. Use trl.GRPOTrainer with "
                "FeatureMatchingReward among its reward functions instead."
            )
    if is_deepspeed_zero3_enabled():
        raise ConfigError("DeepSpeed ZeRO-3 is not supported with whole completions. Use ZeRO-2 or DDP.")
    if args.use_transformers_continuous_batching:
        raise ConfigError("use_transformers_continuous_batching is not used here: leave it out, or set use_vllm.")
    if args.vllm_structured_outputs_regex is not None and not args.use_vllm:
        raise ConfigError("vllm_structured_outputs_regex needs vLLM: set use_vllm, or leave it out.")
    if args.use_vllm and not args.uses_server and args.adaptive_max_tokens:
        args.adaptive_max_tokens = False
        warnings.warn(
            "adaptive_max_tokens is set to false: vLLM inside the trainer (vllm_mode: colocate) takes one limit for "
            "all completions.",
            stacklevel=3,
        )


def check_model(model: nn.Module) -> None:
    """Refuse models whose completions TRL could not score: it looks for the decoder where transformers keeps it."""
    causal_lm = unwrap_adapter(model)
    if getattr(causal_lm, "base_model", causal_lm) is causal_lm:
        raise ModelError(
            f"{type(causal_lm).__name__} does not keep its decoder under its base_model_prefix "
            f"({causal_lm.base_model_prefix!r}), where TRL's GRPO looks for it. Use ebft.mode: strided for this model."
        )


def check_rows(name: str, dataset: Any, args: Any, columns: tuple[str, ...] = ("prompt",)) -> None:
    """Refuse datasets without the `columns`, or with ones that do not belong there; DataError says which."""
    if isinstance(dataset, dict):
        for key, part in dataset.items():
            check_rows(f"{name}[{key!r}]", part, args, columns)
        return
    present = getattr(dataset, "column_names", None)
    if present is None:
        return
    missing = [column for column in columns if column not in present]
    if missing:
        raise DataError(
            f"{name} has the columns {', '.join(present)}, and {' and '.join(missing)} are needed: prompt (text or "
            "messages), and ground_truth (the reference) for feature matching."
        )
    reserved = [column for column in RESERVED_COLUMNS if column in present]
    if reserved:
        raise DataError(
            f"{name} has a column {reserved[0]!r}, a name that reward functions are called with. Rename it."
        )
    if isinstance(dataset, Dataset) and not len(dataset):
        raise DataError(f"{name} has no rows.")
    prompts = args.generation_batch_size // args.num_generations
    if name == "train_dataset" and isinstance(dataset, Dataset) and len(dataset) < prompts:
        raise DataError(
            f"{len(dataset)} prompts do not fill one generation batch of {prompts} (generation_batch_size "
            f"{args.generation_batch_size}, by default the completions of one optimizer step, in groups of "
            f"num_generations {args.num_generations}). Give more rows, or lower gradient_accumulation_steps or the "
            "batch size."
        )
    if "remaining_turns" in present and args.use_vllm and not args.uses_server:
        raise DataError(
            f"{name} has remaining_turns, and vLLM inside the trainer rolls out one turn only. Set vllm_mode: server "
            "or managed, use_vllm: false, or a transform of single turns (ebft_chat_multiturn.transform_last_turn)."
        )
