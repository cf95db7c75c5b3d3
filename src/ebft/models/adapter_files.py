"""What the settings of a saved adapter say about its use, read without loading it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ebft.data.locate import lasting_name
from ebft.models.classifier_files import SCORE, STEPS
from ebft.paths import json_object

_HEADS = ("lm_head", "embed_out")  # names of output layers in transformers
_TASKS = {"ForCausalLM": "CAUSAL_LM", SCORE: "SEQ_CLS", STEPS: "TOKEN_CLS"}  # by the ending of class names
_KINDS = {
    "CAUSAL_LM": "a language model",
    "SEQ_CLS": "a reward model (reward_model: true)",
    "TOKEN_CLS": "a process reward model (process_reward_model: true)",
}


def adapter_settings(name: str) -> dict[str, Any]:
    """The object in adapter_config.json; empty if it cannot be read, which is reported when it is loaded."""
    try:
        return json_object(Path(lasting_name(name)).expanduser() / "adapter_config.json")
    except (OSError, ValueError):
        return {}


def task_problem(name: str, class_ending: str) -> str | None:
    """Why an adapter does not fit a model of the class, as a message; None if it does, or has no settings."""
    settings, wanted = adapter_settings(name), _TASKS[class_ending]
    found = settings.get("task_type")
    if not settings or found == wanted or (found is None and class_ending == "ForCausalLM"):
        return None
    of = _KINDS.get(found, f"another kind of model (task_type: {found!r:.60})") if isinstance(found, str) else "no task"
    merge = " Or merge it into its base model (ebft merge-lora), and set base_model to the result."
    return (
        f"lora_model_dir: {name} is an adapter of {of}, but this run trains {_KINDS[wanted]}, which has another output "
        f"layer. Remove lora_model_dir to train a new adapter.{merge if found == 'CAUSAL_LM' else ''}"
    )


def adapted_heads(targets: Any) -> Iterator[str]:
    """The output layers that PEFT's `target_modules` select: a regular expression, or suffixes of names."""
    if not isinstance(targets, str):
        given = [target for target in targets or () if isinstance(target, str)]
        yield from (name for name in _HEADS if name in given)
        return
    try:
        yield from (name for name in _HEADS if re.fullmatch(targets, name))
    except re.error:  # reported when the adapter is created
        return


def adapted_head(name: str) -> str | None:
    """The output layer that a saved adapter adapts; None if it does not, or replaces it by a trained copy."""
    settings = adapter_settings(name)
    excluded = set(adapted_heads(settings.get("exclude_modules")))
    return next((head for head in adapted_heads(settings.get("target_modules")) if head not in excluded), None)
