"""Forward passes of a plain causal LM over rows of several documents, which do not attend to each other.

transformers separates documents by their positions, which start at 0 in each document, if there is no attention mask:
flash attention receives their boundaries, and other implementations a mask of the document of each token. For models
that do not separate them, each document of a packed row becomes a row.

    B  rows    S  tokens of the longest row    T  tokens of all rows, without padding
    D  documents    L  tokens of the longest document
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ebft.data.documents import JoiningCollator
from ebft.data.transforms.rows import IGNORE
from ebft.models.causal_lm import evaluating, unwrap_adapter
from ebft.prefix.forward import recurrent_layers
from ebft.prefix.parity import difference_and_tolerance
from ebft.transformers_internals import attention_of, takes_attention_functions

_LENGTHS = (11, 7), (8, 5)  # tokens of the documents of two rows, which are compared with separate documents


def model_inputs(batch: dict[str, Tensor], padding_free: bool) -> dict[str, Any]:
    """The arguments of the model for a batch of `JoiningCollator`: all rows in one row if `padding_free`."""
    if "position_ids" not in batch and not padding_free:
        return batch
    inputs = {name: value for name, value in batch.items() if name != "attention_mask"}
    mask = batch["attention_mask"]
    if padding_free:
        inputs.setdefault("position_ids", torch.arange(mask.shape[1], device=mask.device).expand_as(mask))
        inputs["labels"] = inputs["labels"].masked_fill(inputs["position_ids"] == 0, IGNORE)
        real = mask.bool()
        inputs = {name: value[real][None] for name, value in inputs.items()}
    return {**inputs, "use_cache": False}  # with a cache, transformers does not separate documents


def in_own_rows(batch: dict[str, Tensor], divided: bool) -> list[tuple[dict[str, Tensor], Tensor]]:
    """A batch of packed rows (B, S) with a row for each document, padded on the right, as one batch (D, L) or several.

    If it is `divided`, documents of similar lengths are together, so that none of the batches has more tokens with
    padding than the packed rows. Each batch comes with the places (D, L) of its tokens in the packed rows, -1 for
    padding.
    """
    real = batch["attention_mask"].bool()
    columns = batch["position_ids"][real]
    rows = columns.eq(0).cumsum(0) - 1
    lengths = rows.bincount()
    places = columns.new_full((len(lengths), int(lengths.max())), -1)
    places[rows, columns] = real.flatten().nonzero().squeeze(1)
    found, groups = lengths.tolist(), list[list[int]]()
    for document in sorted(range(len(found)), key=lambda index: -found[index]):
        if groups and (not divided or (len(groups[-1]) + 1) * found[groups[-1][0]] <= real.numel()):
            groups[-1].append(document)
        else:
            groups.append([document])
    filling, parts = {"input_ids": 0, "attention_mask": 0, "labels": IGNORE}, []
    for own in (places[group, : found[group[0]]] for group in groups):
        taken = {name: batch[name].flatten()[own.clamp_min(0)] for name in filling}
        parts.append(({name: value.masked_fill(own < 0, filling[name]) for name, value in taken.items()}, own))
    return parts


def in_packed_rows(losses: list[Tensor], places: list[Tensor], mask: Tensor) -> Tensor:
    """Losses (D, L - 1) of the batches of `in_own_rows`, in the packed rows of mask (B, S): (B, S - 1)."""
    rows = losses[0].new_zeros(mask.numel())
    for own, where in zip(losses, places):
        is_real = where[:, 1:] >= 0
        rows[where[:, 1:][is_real]] = own[is_real]
    return rows.view_as(mask)[:, 1:]


def has_label(batch: dict[str, Tensor]) -> Tensor:
    """Whether a token is real and has a token of its own document before it, from the second on: (B, S - 1)."""
    real = batch["attention_mask"][:, 1:].bool()
    return real & batch["position_ids"][:, 1:].ne(0) if "position_ids" in batch else real


def in_rows(losses: Tensor, mask: Tensor) -> Tensor:
    """Losses (1, T - 1) of the tokens from the second on, without padding, in the rows of mask (B, S): (B, S - 1)."""
    rows = losses.new_zeros(mask.shape)
    rows[mask.bool()] = F.pad(losses[0], (1, 0))
    return rows[:, 1:]


def count_documents(batch: dict[str, Tensor]) -> int:
    if "position_ids" not in batch:
        return len(batch["input_ids"])
    return int((batch["position_ids"].eq(0) & batch["attention_mask"].bool()).sum())


def why_not_joined(model: nn.Module) -> str | None:
    """Why layers of a model carry information from one document of a row to the next; None if none is known to."""
    causal_lm = unwrap_adapter(model)
    name, found = type(causal_lm).__name__, recurrent_layers(causal_lm)
    if found:
        return (
            f"{name} has state-space, convolution or linear-attention layers ({', '.join(found)}), whose state passes "
            "from one document of a row to the next"
        )
    if not takes_attention_functions(causal_lm):
        return f"{name} does not support the attention interface of transformers, which separates documents of a row"
    return None


def why_not_separated(model: nn.Module, causal_lm: PreTrainedModel, padding_free: bool) -> str | None:
    """How much the log-probabilities of documents in packed rows differ from each document alone, if they do.

    `model` is `causal_lm` as it is wrapped for training; with several processes, all must call this.
    """
    vocabulary, generator = causal_lm.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
    draw = lambda length: torch.randint(vocabulary, (length,), generator=generator).tolist()
    rows = [{"documents": [{"input_ids": draw(length)} for length in lengths]} for lengths in _LENGTHS]
    with evaluating(model):
        together = _logps(model, causal_lm, rows, padding_free)
        alone = [_logps(model, causal_lm, [{"documents": [each]}], False) for row in rows for each in row["documents"]]
    lengths = [len(each) for each in alone]
    for ours, expected in zip(together.split(lengths), alone):
        difference, tolerance = difference_and_tolerance(causal_lm, "log-probabilities", (ours - expected).abs())
        if not difference <= tolerance:
            return (
                f"{type(causal_lm).__name__} does not separate the documents of a packed row with the attention "
                f"{attention_of(causal_lm)}: their log-probabilities differ from separate "
                f"documents' by {difference:.2g} (tolerance: {tolerance:g})"
            )
    return None


def _logps(model: nn.Module, causal_lm: PreTrainedModel, rows: list[dict[str, Any]], padding_free: bool) -> Tensor:
    """The log-probabilities of all tokens that have a document's token before them, in order: (tokens,)."""
    batch = {name: value.to(causal_lm.device) for name, value in JoiningCollator(0)(rows).items()}
    inputs = model_inputs(batch, padding_free)
    del inputs["labels"]
    logps = model(**inputs).logits[:, :-1].float().log_softmax(-1)
    logps = logps.gather(-1, inputs["input_ids"][:, 1:, None]).squeeze(-1)
    return (in_rows(logps, batch["attention_mask"]) if padding_free else logps)[has_label(batch)]
