"""Training of some parameters of the model, selected by their names (`unfrozen_parameters`)."""

from __future__ import annotations

import re

from transformers import PreTrainedModel

from ebft.errors import ModelError
from ebft.models.adapter_targets import matching


def freeze_except(
    model: PreTrainedModel, patterns: list[str] | None, gradient_checkpointing: bool = False
) -> PreTrainedModel:
    """`model`, in which only the parameters whose names match one of `patterns` from the start are trained.

    None: all parameters stay trained. Raises ModelError if a pattern matches no parameter.
    """
    if patterns is None:
        return model
    names = dict(model.named_parameters())
    trained: set[str] = set()
    for pattern in patterns:
        found = matching(re.match, pattern, list(names), "unfrozen_parameters")
        trained.update(found)
        if not found:
            _refuse_tied(model, pattern)
            raise ModelError(
                f"unfrozen_parameters: {pattern!r} matches no parameter. Names are compared from the start, such as "
                f"{_example(names)}."
            )
    for name, parameter in names.items():
        parameter.requires_grad_(name in trained)
    if gradient_checkpointing and not model.get_input_embeddings().weight.requires_grad:
        # Frozen embeddings give activations without gradient, and reentrant checkpoints then drop the whole segment.
        model.enable_input_require_grads()
    return model


def _refuse_tied(model: PreTrainedModel, pattern: str) -> None:
    """Raise ModelError if the pattern matches another name of a parameter, as of a tied output layer."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared = first.setdefault(id(parameter), name)
        if shared != name and re.match(pattern, name):
            raise ModelError(
                f"unfrozen_parameters: {pattern!r} matches {name}, which is the same parameter as {shared} in this "
                f"model (tie_word_embeddings). Name {shared}: both layers are then trained."
            )


def _example(names: dict) -> str:
    listed = list(names)
    return " and ".join(dict.fromkeys((listed[len(listed) // 2], listed[-1])))
