"""A check before training: the documents of a row must not see each other.

transformers derives this from the positions of a row; models with recurrent layers or attention of their own do not.

T  tokens   V  vocabulary
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ebft.data.streaming.rows import Position
from ebft.errors import ModelError
from ebft.models.causal_lm import evaluating
from ebft.over_transformers import attention_of
from ebft.streams.collator import StreamCollator

_LENGTHS = (7, 12, 5)
# Differences of log-probabilities, in nats. In full precision they come from the order of summation.
_REMEDY = "Set pretrain_multipack_attn: false to train on rows as one text"
_FULL_TOLERANCE, _ROUGH_TOLERANCE = 5e-3, 0.15


def check_apart(model: PreTrainedModel, collator: StreamCollator) -> None:
    """Raise ModelError if the log-probabilities of a document depend on the others in its row."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    documents = [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in _LENGTHS]
    with evaluating(model):
        try:
            together = _logps(model, collator, documents, device)
        except TypeError as error:
            raise ModelError(
                f"{type(model).__name__} does not accept the positions of several documents in a row ({error}). "
                f"{_REMEDY}"
            ) from error
        alone = torch.cat([_logps(model, collator, [document], device) for document in documents])
    differences = (together - alone).abs().amax(-1)[_LENGTHS[0] :]  # of the documents after the first
    is_full = model.dtype == torch.float32 and not getattr(model, "is_quantized", False) and device.type != "cuda"
    difference = (differences.max() if is_full else differences.median()).item()
    tolerance = _FULL_TOLERANCE if is_full else _ROUGH_TOLERANCE
    if difference > tolerance:  # weights that are not finite are reported in the first step
        raise ModelError(
            f"{type(model).__name__} does not keep the documents of a row apart with attn_implementation: "
            f"{attention_of(model)}: their log-probabilities change by {difference:.2g} (tolerance: "
            f"{tolerance:g}). {_REMEDY}, or use another attn_implementation"
        )


def _logps(model: PreTrainedModel, collator: StreamCollator, documents: list[list[int]], device: Any) -> Tensor:
    """Log-probabilities (T, V) of a row of documents."""
    ids = [token for document in documents for token in document]
    lengths = [len(document) for document in documents]
    batch = collator(
        [{"input_ids": ids, "labels": ids, "seq_lengths": lengths, "position": Position(), "pieces": len(documents)}]
    )
    inputs = {name: batch[name].to(device) for name in ("input_ids", "position_ids")}
    return model(**inputs, use_cache=False).logits[0].float().log_softmax(-1)
