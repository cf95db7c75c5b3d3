"""Cross-entropy of token sequences from a plain forward pass, for any causal language model.

L  tokens of a sequence   V  vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ebft.models.causal_lm import evaluating, unwrap_adapter

TOKENS_PER_PASS = 4096  # with a vocabulary of 150,000, the logits take 2.5 GB in float32


def token_nll(model: nn.Module, sequences: list[list[int]]) -> list[Tensor]:
    """Return the negative log-likelihood of every token of each sequence except the first: (L - 1,) each.

    In nats, at temperature 1. Padding is on the right, which causal models do not attend to.
    """
    device = unwrap_adapter(model).device
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    found: dict[int, Tensor] = {}
    for batch in _batches(order, [len(ids) for ids in sequences]):
        rows = [torch.tensor(sequences[i], device=device) for i in batch]
        input_ids = pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        attention_mask = (torch.arange(input_ids.shape[1], device=device) < lengths[:, None]).long()
        with evaluating(model):
            logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits[:, :-1]
            for i, row_logits, row in zip(batch, logits, rows):
                found[i] = F.cross_entropy(row_logits[: len(row) - 1].float(), row[1:], reduction="none").cpu()
    return [found[i] for i in range(len(sequences))]


def _batches(order: list[int], lengths: list[int]) -> list[list[int]]:
    """Return batches of the sequences in the given order, with at most TOKENS_PER_PASS tokens including padding."""
    batches: list[list[int]] = []
    for i in order:
        if batches and (len(batches[-1]) + 1) * lengths[i] <= TOKENS_PER_PASS:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches
