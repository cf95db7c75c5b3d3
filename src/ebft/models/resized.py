"""Embeddings that were resized before training: with how many rows an adapter has them, and whether it has all."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path

from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from ebft.catalog import is_gguf
from ebft.errors import ModelError
from ebft.models.causal_lm import unwrap_adapter

_SAVED_AS = (".weight", ".base_layer.weight")  # of layers that are saved whole, and of those with LoRA


def saved_rows(model: PreTrainedModel, rows: Mapping[str, int]) -> int | None:
    """The rows of the embeddings that an adapter has, given the rows of each of its weights; None if it has none."""
    found = [rows[key] for names in _embedding_layers(model) for name in names for key in _keys(name) if key in rows]
    return found[0] if found else None


def saved_layers(model: PreTrainedModel, weights: Collection[str]) -> tuple[list[str], list[str]]:
    """The embedding and output layer that the `weights` of an adapter have, and those that they lack, by last parts.

    Of layers that share their weight, one is enough.
    """
    found: tuple[list[str], list[str]] = [], []
    for names in _embedding_layers(model):
        is_saved = any(key in weights for name in names for key in _keys(name))
        found[not is_saved].extend(name.rpartition(".")[2] for name in names)
    return found


def check_saves_resized(model: PeftModel, size: int, key: str) -> None:
    """Raise ModelError if PEFT would save some of the embeddings with the adapter, but not all.

    `size`: their rows in the base model, from which they were resized. If LoRA adapts one of two layers, PEFT saves
    this one only, and the new rows of the other one, which are random, would be lost.
    """
    rows = _rows(unwrap_adapter(model))
    if rows == size:
        return
    with warnings.catch_warnings():  # which are repeated when the adapter is saved
        warnings.simplefilter("ignore")
        present, missing = saved_layers(unwrap_adapter(model), get_peft_model_state_dict(model))
    if not missing or (rows < size and not present):  # the first rows of the base model
        return
    only = f"{' and '.join(present)} only" if present else "neither of them"
    remedy = (
        "the saved adapter cannot be changed. Train a new one, without lora_model_dir"
        if key == "lora_model_dir"
        else f"new rows of {' and '.join(missing)} would be lost. Add {' and '.join(missing)} to "
        f"{'lora_target_modules or ' if present else ''}lora_modules_to_save"
    )
    raise ModelError(
        f"{key}: the embeddings were resized from {size} to {rows} rows for the tokenizer, but PEFT saves "
        f"{only} with the adapter: {remedy}, or remove the keys that change the vocabulary (tokens, "
        "special_tokens, resize_token_embeddings_to_32x, shrink_embeddings)."
    )


def fit_to_adapter(model: PreTrainedModel, path: Path, tokens: int | None = None) -> None:
    """Resize the embeddings to those in the file of an adapter, but to at least `tokens` rows, or those of the model.

    Raises ModelError if the file has too few rows, or only one of two layers that were resized.
    """
    with safe_open(path, framework="pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (not a dict)
    rows = saved_rows(model, {name: shape[0] for name, shape in shapes.items() if shape})
    if rows is None:
        return
    own = _rows(model)
    least = own if tokens is None else tokens
    if rows < least:
        raise ModelError(
            f"{path} has embeddings of {rows} rows, but the tokenizer and the keys of the vocabulary need {least}. Use "
            "those that the adapter was trained with (tokens, special_tokens, resize_token_embeddings_to_32x, "
            "shrink_embeddings)"
        )
    present, missing = saved_layers(model, shapes)
    if missing and rows != _original_rows(model):
        raise ModelError(not_whole(path, rows, present, missing))
    if rows != own:
        model.resize_token_embeddings(rows, mean_resizing=False)


def not_whole(adapter: Path | str, rows: int, present: list[str], missing: list[str]) -> str:
    """The message for an adapter that was saved without one of the layers that were resized."""
    return (
        f"{adapter} was trained with embeddings that were resized to {rows} rows, but has only those of "
        f"{' and '.join(present)}: the new rows of {' and '.join(missing)} were not saved. Train again with "
        f"{' and '.join(missing)} in lora_target_modules or lora_modules_to_save"
    )


def _embedding_layers(model: PreTrainedModel) -> list[list[str]]:
    """The names of the input embedding and the output layer, if there is one; tied ones together."""
    names = {id(module): name for name, module in model.named_modules()}
    layers = [layer for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer is not None]
    found: dict[int, list[str]] = {}
    for layer in layers:
        found.setdefault(id(_inner(layer).weight), []).append(names[id(layer)])
    return list(found.values())


def _rows(model: PreTrainedModel) -> int:
    return _inner(model.get_input_embeddings()).num_embeddings  # the weight itself may be partitioned


def _inner(layer: nn.Module) -> nn.Module:
    """The layer without what PEFT puts around it."""
    while inner := layer._modules.get("base_layer") or layer._modules.get("original_module"):
        layer = inner
    return layer


def _keys(name: str) -> list[str]:
    return [f"base_model.model.{name}{ending}" for ending in _SAVED_AS]


def _original_rows(model: PreTrainedModel) -> int | None:
    """The size of the vocabulary in config.json of the model; None for GGUF files, whose vocabulary is not resized."""
    name = model.config.name_or_path
    if is_gguf(name):
        return _rows(model)
    return type(model.config).from_pretrained(name).get_text_config().vocab_size
