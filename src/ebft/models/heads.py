"""The output layer of a model: logits of the next token, one score per text, or classes of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from ebft.errors import ModelError
from ebft.models import files


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
SCORE = Head(files.SCORE, AutoModelForSequenceClassification, "SEQ_CLS", 1)


def step_head(num_labels: int) -> Head:
    """The head that classifies tokens; those that end a step are trained on."""
    return Head(files.STEPS, AutoModelForTokenClassification, "TOKEN_CLS", num_labels)


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
