"""What structured mode's trainers check before they load or start anything: arguments and rows."""

from __future__ import annotations

import warnings
from typing import Any

from datasets import Dataset
from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled

from ebft.data.prompt_rows import RESERVED
from ebft.errors import ConfigError, DataError, ModelError
from ebft.models.causal_lm import unwrap_adapter


def check_arguments(args: Any, config_class: type, trainer_kwargs: dict[str, Any]) -> None:
    """Refuse arguments that would have no effect here, or the wrong one."""
    if not isinstance(args, config_class):
        raise ConfigError(f"args must be of class {config_class.__name__}, got {type(args).__name__}")
    for name in ("rollout_func", "tools", "environment_factory"):
        if trainer_kwargs.get(name) is not None:
            raise ConfigError(
                f"{name} makes rollouts of its own, and this trainer has its own already. Use trl.GRPOTrainer with "
                "FeatureMatchingReward among its reward functions instead."
            )
    if is_deepspeed_zero3_enabled():
        raise ConfigError("DeepSpeed ZeRO-3 is not supported with full completions. Use ZeRO-2 or DDP.")
    if args.use_transformers_continuous_batching:
        raise ConfigError("use_transformers_continuous_batching is not used here: leave it out, or set use_vllm.")
    if args.use_vllm and not args.uses_server and getattr(args, "adaptive_max_tokens", False):  # not an option of GRPO
        args.adaptive_max_tokens = False
        warnings.warn(
            "adaptive_max_tokens is set to false: vLLM inside the trainer (vllm_mode: colocate) takes one limit for "
            "all completions.",
            stacklevel=3,
        )


def check_model(model: nn.Module, args: Any) -> None:
    """Refuse models whose completions TRL could not score, and adapters that a server would not find."""
    if args.uses_server and hasattr(model, "disable_adapter") and model.active_adapter != "default":
        raise ModelError(
            f"the adapter sent to vLLM must have PEFT's own name 'default', the active one is {model.active_adapter!r}."
            " Leave adapter_name out when you make it."
        )
    causal_lm = unwrap_adapter(model)
    if getattr(causal_lm, "base_model", causal_lm) is causal_lm:
        raise ModelError(
            f"{type(causal_lm).__name__} does not keep its decoder under its base_model_prefix "
            f"({causal_lm.base_model_prefix!r}), where TRL's GRPO looks for it. Use ebft.mode: strided for this model."
        )


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse a tokenizer that has nothing to pad rows with."""
    if tokenizer is not None and tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        raise ModelError(
            "the tokenizer has neither a padding nor an end-of-sequence token, and rows of a batch are padded. Set its "
            "pad_token (in a config: special_tokens.pad_token)."
        )


def check_reference_model(model: nn.Module, reference: nn.Module | None) -> None:
    """Refuse a reference model (beta above 0, no adapter) whose vocabulary, as saved, is not the policy's."""
    if reference is None:
        return
    ours, theirs = (m.get_input_embeddings().weight.shape[0] for m in (model, reference))
    if ours != theirs:
        raise ModelError(
            f"beta above 0 compares the policy with its base model as saved, which has {theirs} token embeddings and "
            f"the policy {ours}: special_tokens added some. Save a base model with them, set an adapter, or beta: 0."
        )


def check_rows(name: str, dataset: Any, args: Any, columns: tuple[str, ...] = ("prompt",)) -> None:
    """Refuse datasets without the `columns`, or with ones that do not belong there; DataError says which."""
    if isinstance(dataset, dict):
        for key, part in dataset.items():
            check_rows(f"{name}[{key!r}]", part, args, columns)
        return
    if isinstance(dataset, (list, tuple)):
        raise DataError(f"{name} is a {type(dataset).__name__} of rows. Give datasets.Dataset.from_list(rows).")
    present = getattr(dataset, "column_names", None)
    if present is None:
        return
    missing = [column for column in columns if column not in present]
    if missing:
        raise DataError(
            f"{name} has the columns {', '.join(present)}, and {' and '.join(missing)} are needed: prompt (text or "
            "messages), and ground_truth (the reference) for feature matching."
        )
    reserved = [column for column in RESERVED if column in present]
    if reserved:
        raise DataError(
            f"{name} has a column {reserved[0]!r}, a name that reward functions are called with. Rename it."
        )
    if isinstance(dataset, Dataset) and not len(dataset):
        raise DataError(f"{name} has no rows.")
    if "ground_truth" in columns and isinstance(dataset, Dataset):
        empty = [i for i, text in enumerate(dataset["ground_truth"]) if not isinstance(text, str) or not text.strip()]
        if empty:
            raise DataError(
                f"{name} has {len(empty)} rows without a reference (ground_truth is empty or no text), the first of "
                f"them row {empty[0]}. Leave them out."
            )
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
