"""Weight-only quantisation with torchao, with the perplexity before and after it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TorchAoConfig

from ebft.data.conversation import Renderer
from ebft.data.transforms.rows import IGNORE, encode
from ebft.errors import DataError, ModelError
from ebft.files import read_text
from ebft.models.files import read_object, refuse_classifier
from ebft.models.pretrained import explained, pretrained_model, pretrained_tokenizer
from ebft.scores import Scores
from ebft.tools.evaluation.models import ADAPTER_FILE
from ebft.tools.evaluation.run import has_reference, token_nll
from ebft.tools.evaluation.task import load_held_out
from ebft.tools.export.checkpoint import check_free, new_folder, read_checkpoint

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig

TYPES = ("int8", "int4")
GROUP_SIZE = 32  # weights that share a scale, with int4; int8 has one scale per row
WINDOW = 512  # tokens of a text that are scored with their own context


@dataclass(frozen=True)
class ScoredTokens:
    """A sequence, and the number of tokens at its end that are scored; the others are context."""

    ids: list[int]
    scored: int


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
    folder: Path, to: Path, kind: str, sequences: Callable[[PreTrainedTokenizerBase], list[ScoredTokens]]
) -> QuantizeResult:
    """Write the model in `folder` with its linear layers quantised to `to`, in safetensors format.

    `kind`: int8 or int4, see `TYPES`. The perplexity of `sequences(tokenizer)` is measured on the model in `folder` and
    on the written one after loading it with `from_pretrained`. Raises ModelError if this kind does not run on this
    machine, or if the folder has no model that can be quantised.
    """
    _check_source(folder)
    refuse_classifier(folder, "ebft quantize, which measures the perplexity of text, does not support it")
    given, to = to, to.resolve()  # the folder of a link is replaced, not the link
    check_free(to)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    settings = torchao_settings(kind, device)
    size = sum(weight.nbytes for weight in read_checkpoint(folder).weights.values())
    tokenizer = _loaded(pretrained_tokenizer, folder)
    scored = sequences(tokenizer)
    options = {"dtype": "auto", "device_map": {"": str(device)}}
    before = perplexity(_loaded(pretrained_model, folder, **options), scored)
    model = _loaded(pretrained_model, folder, quantization_config=TorchAoConfig(settings), **options)
    try:
        with new_folder(to) as staged:
            model.save_pretrained(staged)
            tokenizer.save_pretrained(staged)
            del model
            after = perplexity(_loaded(pretrained_model, staged, **options), scored)
    except (OSError, SafetensorError) as error:  # of safetensors if the disk is full
        raise ModelError(
            f"Cannot write to {to.parent}: {error}. Free disk space, or choose another folder with --output."
        ) from error
    own = sum(path.stat().st_size for path in to.glob("*.safetensors"))
    return QuantizeResult(given, size, own, sum(one.scored for one in scored), before, after)


def torchao_settings(kind: str, device: torch.device) -> Any:
    """The settings of torchao for a kind of weights. Raises ModelError if they do not run on the device."""
    if kind not in TYPES:
        raise ModelError(f"--type: invalid value {kind!r}; expected {' or '.join(TYPES)}.")
    if importlib.util.find_spec("torchao") is None:
        raise ModelError("Quantisation requires the package torchao: pip install 'ebft[quantize]'")
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    packing = "tile_packed_to_4d" if device.type == "cuda" else "plain"
    int8 = kind == "int8"
    settings = Int8WeightOnlyConfig() if int8 else Int4WeightOnlyConfig(GROUP_SIZE, int4_packing_format=packing)
    layer = nn.Linear(256, 256, bias=False, dtype=torch.bfloat16, device=device)
    try:
        quantize_(layer, settings)
        layer(torch.ones(1, 256, dtype=torch.bfloat16, device=device))
    except Exception as error:  # kernels that are absent raise errors of many types
        other = "" if int8 else " Use --type int8, or a machine with a CUDA device."
        raise ModelError(f"--type {kind} does not run on {device.type} with this torchao: {error}.{other}") from error
    return settings


def perplexity(model: PreTrainedModel, sequences: list[ScoredTokens]) -> float:
    """The perplexity of the scored tokens of sequences."""
    scores = Scores()
    for number, (one, nll) in enumerate(zip(sequences, token_nll(model, [one.ids for one in sequences]))):
        scores.add("ce_loss", [number], [nll[len(nll) - one.scored :].sum()], [one.scored])
    return scores.means()["perplexity"]


def text_sequences(path: Path, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[ScoredTokens]:
    """The first `max_tokens` tokens of a text file, in windows. Raises DataError if it is too short."""
    ids = encode(tokenizer, read_text(path), special=True)[:max_tokens]
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
    found = [ScoredTokens(window, len(window) - 1) for window in windows if len(window) > 1]
    if not found:
        raise DataError(f"{path} has fewer than two tokens. Use a longer text.")
    return found


def held_out_sequences(config: RunConfig, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[ScoredTokens]:
    """The held-out rows of a config, up to `max_tokens` tokens; of prompts with references, the references count."""
    rows = load_held_out(config, tokenizer).rows
    renderer = Renderer(tokenizer, config.chat_template_kwargs)
    found, total = [], 0
    for row in rows:
        if config.method.rows == "tokens":
            ids, labels = row["input_ids"], row["labels"]
            first = next((place for place, label in enumerate(labels) if label != IGNORE), len(ids))
            one = ScoredTokens(ids, len(ids) - max(first, 1))
        elif has_reference(row):
            conversation = renderer.of_row(row)
            one = ScoredTokens(conversation.prompt_ids + conversation.reference_ids, len(conversation.reference_ids))
        else:
            continue
        total += len(one.ids)
        if found and total > max_tokens:
            break
        if one.scored > 0:
            found.append(one)
    if not found:
        raise DataError("The held-out data of the config has no text to score. Give a text file with --text.")
    return found


def _check_source(folder: Path) -> None:
    if (folder / ADAPTER_FILE).is_file():
        raise ModelError(
            f"{folder} contains an adapter. Merge it first (ebft merge-lora {folder}), then quantise "
            f"the merged model: ebft quantize {folder / 'merged'} --output DIR"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} contains no model (no config.json).")
    quantised = read_object(folder / "config.json", "Copy or download it again.").get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ModelError(
            f"The model in {folder} is already quantised ({method}). Quantise the model that it was made from instead."
        )


def _loaded(load: Callable[..., Any], folder: Path, **options: Any) -> Any:
    try:
        found = load(str(folder), **options)
    except Exception as error:  # transformers and PyTorch raise many types of errors for unsuitable files
        raise ModelError(f"{folder} cannot be loaded: {explained(error)}") from error
    return found.eval() if isinstance(found, nn.Module) else found
