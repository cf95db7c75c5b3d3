"""Quantisation with torchao, with the perplexity before and after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TorchAoConfig

from ebft.catalog import refuse_classifier
from ebft.data.conversation import Renderer
from ebft.data.transforms.rows import IGNORE, encode
from ebft.errors import ModelError, doing
from ebft.files import json_object, new_folder, read_text
from ebft.methods.base_config import QuantizationSection
from ebft.models.pretrained import pretrained_model, pretrained_tokenizer
from ebft.models.weights import quantised_layers, ternary, torchao_settings
from ebft.run.config.schema import RunConfig
from ebft.scores import Scores
from ebft.tools.evaluation.models import ADAPTER_FILE
from ebft.tools.evaluation.run import has_reference, token_nll
from ebft.tools.evaluation.task import load_held_out
from ebft.tools.export.checkpoint import check_empty, read_checkpoint

WINDOW = 512  # tokens of a text that are scored with their own context


@dataclass(frozen=True)
class ScoredTokens:
    """A sequence, and the places of the tokens that are scored, not the first one; the others are context."""

    ids: list[int]
    scored: Sequence[int]


@dataclass(frozen=True)
class QuantizeResult:
    """The folder of a quantised model, sizes of the weights in bytes, and perplexities."""

    folder: Path
    size_before: int
    size_after: int
    tokens: int
    perplexity_before: float
    perplexity_after: float


def quantize_model(
    folder: Path,
    to: Path,
    wanted: QuantizationSection,
    sequences: Callable[[PreTrainedTokenizerBase], list[ScoredTokens]],
) -> QuantizeResult:
    """Write the model in `folder` with its linear layers quantised to `to`, in safetensors format.

    The perplexity of `sequences(tokenizer)` is measured on the model in `folder` and on the written one after loading
    it with `from_pretrained`. Raises ModelError if what is wanted does not fit the model in the folder.
    """
    if (folder / ADAPTER_FILE).is_file():
        raise ModelError(f"{folder} contains an adapter. Merge it first: ebft merge-lora {folder}")
    with doing(f"reading {folder / 'config.json'}"):
        quantised = json_object(folder / "config.json").get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ModelError(f"The model in {folder} is already quantised ({method}). Quantise the original model.")
    refuse_classifier(folder, "ebft quantize, which measures the perplexity of text, does not support it")
    given, to = to, to.resolve()  # the folder of a link is replaced, not the link
    check_empty(to)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    weights = read_checkpoint(folder).weights.values()
    is_ternary = wanted.weight_dtype == "ternary"
    options = {"dtype": "auto", "device_map": {"": str(device)}}
    tokenizer, plain = pretrained_tokenizer(str(folder)), pretrained_model(str(folder), **options).eval()
    scored = sequences(tokenizer)
    settings = None if is_ternary else _for_model(torchao_settings(wanted, device), wanted, plain)
    before = perplexity(plain, scored)
    if is_ternary:
        for layer in quantised_layers(wanted, plain)[0].values():
            layer.weight.data = ternary(layer.weight.data) if type(layer) is nn.Linear else layer.weight.data
    model = plain if is_ternary else None
    del plain
    inputs = f" with activation_dtype: {wanted.activation_dtype}" if wanted.activation_dtype else ""
    with doing(f"quantising to weight_dtype: {wanted.weight_dtype}{inputs} on {device.type}"), new_folder(to) as staged:
        model = model or pretrained_model(str(folder), quantization_config=settings, **options)
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        del model
        after = perplexity(pretrained_model(str(staged), **options).eval(), scored)
    size, own = sum(weight.nbytes for weight in weights), sum(path.stat().st_size for path in to.glob("*.safetensors"))
    return QuantizeResult(given, size, own, sum(len(one.scored) for one in scored), before, after)


def _for_model(settings: Any, wanted: QuantizationSection, model: PreTrainedModel) -> TorchAoConfig:
    """The settings for the layers of a model. Raises ModelError for layers that do not fit."""
    linear, embeddings, size = quantised_layers(wanted, model)
    if not wanted.quantize_embedding:
        return TorchAoConfig(settings)
    from torchao.quantization import FqnToConfig, IntxWeightOnlyConfig, PerAxis, PerGroup

    of_rows = IntxWeightOnlyConfig(getattr(torch, wanted.weight_dtype), PerAxis(0) if size is None else PerGroup(size))
    endings = sorted({name.rpartition(".")[2] for name in linear})
    layers = {f"re:.*\\.({'|'.join(endings)})\\.weight": settings, **dict.fromkeys(embeddings, of_rows)}
    return TorchAoConfig(FqnToConfig(layers), include_input_output_embeddings=True)


def perplexity(model: PreTrainedModel, sequences: list[ScoredTokens]) -> float:
    scores = Scores()
    for number, (one, nll) in enumerate(zip(sequences, token_nll(model, [one.ids for one in sequences]))):
        of_scored = nll[[place - 1 for place in one.scored]]
        scores.add("ce_loss", [number], [of_scored.sum()], [len(of_scored)])
    with doing("measuring the perplexity of the text (of the config, or of --text)"):
        return scores.means()["perplexity"]


def text_sequences(path: Path, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[ScoredTokens]:
    """The first `max_tokens` tokens of a text file, in windows."""
    ids = encode(tokenizer, read_text(path), special=True)[:max_tokens]
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
    return [ScoredTokens(window, range(1, len(window))) for window in windows if len(window) > 1]


def held_out_sequences(config: RunConfig, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[ScoredTokens]:
    """The held-out rows of a config, up to `max_tokens` tokens; of prompts with references, the references count."""
    rows = load_held_out(config, tokenizer).rows
    renderer = Renderer(tokenizer, config.chat_template_kwargs)
    found, total = [], 0
    for row in rows:
        if config.method.rows == "tokens":
            places = [place for place, label in enumerate(row["labels"]) if label != IGNORE and place > 0]
            one = ScoredTokens(row["input_ids"], places)
        elif has_reference(row):
            conversation = renderer.of_row(row)
            ids, prompt = conversation.prompt_ids + conversation.reference_ids, len(conversation.prompt_ids)
            one = ScoredTokens(ids, range(max(1, prompt), len(ids)))
        else:
            continue
        total += len(one.ids)
        if found and total > max_tokens:
            break
        if one.scored:
            found.append(one)
    return found
