"""The output layer of a model: logits of the next token, one score per text, or classes of tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from ebft.errors import ModelError


@dataclass(frozen=True)
class Head:
    """A kind of output layer: the ending of class names, the class that loads it, and PEFT's name of the task.

    `num_labels` is the number of outputs; None for the vocabulary.
    """

    ending: str
    auto_class: type
    task_type: str
    num_labels: int | None = None


LANGUAGE = Head("ForCausalLM", AutoModelForCausalLM, "CAUSAL_LM")
SCORE = Head("ForSequenceClassification", AutoModelForSequenceClassification, "SEQ_CLS", 1)


def step_head(num_labels: int) -> Head:
    """The head that classifies tokens; those that end a step are trained on."""
    return Head("ForTokenClassification", AutoModelForTokenClassification, "TOKEN_CLS", num_labels)


_CLASSIFIERS = (SCORE, step_head(2))


def task_type(model: nn.Module) -> str:
    """PEFT's name of the task of a model, by its class."""
    name = type(model).__name__
    return next((head.task_type for head in _CLASSIFIERS if name.endswith(head.ending)), LANGUAGE.task_type)


def head_modules(model: PreTrainedModel) -> list[str]:
    """The names of the linear layers that a classifier has in addition to its backbone; none for a language model."""
    if task_type(model) == LANGUAGE.task_type:
        return []
    found = [name for name, child in model.named_children() if isinstance(child, nn.Linear)]
    if len(found) != 1:
        raise ModelError(
            f"{type(model).__name__} does not have the layout of a decoder with one linear layer: its linear layers "
            f"are {', '.join(found) or 'none'}. Use a decoder-only model"
        )
    return found


def refuse_classifier(folder: Path, use: str = "it cannot generate text") -> None:
    """Raise ModelError, with the reason `use`, if a folder has a reward model or an adapter of one."""
    names = _values(folder / "config.json").get("architectures") or []
    tasks = [_values(folder / "adapter_config.json").get("task_type")]
    if any(str(name).endswith(head.ending) for name in names for head in _CLASSIFIERS) or any(
        head.task_type in tasks for head in _CLASSIFIERS
    ):
        raise ModelError(
            f"{folder} is a reward model (of reward_model or process_reward_model), so {use}. A reward model with one "
            "score per text can be used in trl.reward_funcs"
        )


def _values(path: Path) -> dict:
    """The object in a JSON file; empty if it cannot be read, which is reported where it is needed."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
