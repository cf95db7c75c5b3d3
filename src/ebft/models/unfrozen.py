"""Training of some parameters of the model, selected by their names (`unfrozen_parameters`)."""

from __future__ import annotations

import re

from transformers import PreTrainedModel

from ebft.errors import ModelError


def freeze_except(
    model: PreTrainedModel, patterns: list[str] | None, gradient_checkpointing: bool = False
) -> PreTrainedModel:
    """`model`, in which only the parameters whose names match one of `patterns` from the start are trained.

    None: all parameters stay trained. Raises ModelError if a pattern matches no parameter.
    """
    if patterns is None:
        return model
    names = dict(model.named_parameters())
    for pattern in patterns:
        if not any(re.match(pattern, name) for name in names):
            _refuse_tied(model, pattern)
            raise ModelError(
                f"unfrozen_parameters: {pattern!r} matches no parameter. Names are compared from the start, such as "
                f"{_example(names)}."
            )
    for name, parameter in names.items():
        parameter.requires_grad_(any(re.match(pattern, name) for pattern in patterns))
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
