"""The head in chunks: values and gradients of the head at once, whatever the head does."""

import pytest
import torch
from torch import nn

from ebft.strided import logps

ROWS, HIDDEN, VOCAB = 40, 6, 11


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_chunks_change_nothing(dropout, monkeypatch):
    """Also where the head drops out: what backward runs again is what forward ran."""
    monkeypatch.setattr(logps, "LOGITS_PER_CHUNK", 1)  # 16 rows at a time, the least
    torch.manual_seed(0)
    head = nn.Sequential(nn.Dropout(dropout), nn.Linear(HIDDEN, VOCAB))
    states, targets = torch.randn(ROWS, HIDDEN, requires_grad=True), torch.randint(0, VOCAB, (ROWS, 2))
    weight = torch.randn(ROWS, 2)
    inputs = [states, *head.parameters()]
    torch.manual_seed(1)
    found = logps.token_logps(states, targets, head, 0.7, VOCAB)
    torch.rand(7)  # whatever else draws in between
    grads = torch.autograd.grad((found * weight).sum(), inputs)
    torch.manual_seed(1)
    whole = torch.cat([(head(chunk) / 0.7).log_softmax(-1) for chunk in states.split(16)]).gather(-1, targets)
    torch.testing.assert_close(found, whole)
    for ours, expected in zip(grads, torch.autograd.grad((whole * weight).sum(), inputs)):
        torch.testing.assert_close(ours, expected)


def test_what_is_chosen_stays_chosen():
    """`choose` runs once for each chunk, not again in backward, and sees no gradients."""
    seen = []

    def choose(logp, rows):
        seen.append((rows, logp.requires_grad))
        return logp.argmin(-1, keepdim=True)

    head, states = nn.Linear(HIDDEN, VOCAB), torch.randn(ROWS, HIDDEN, requires_grad=True)
    tokens, found = logps.chosen_logps(states, choose, head, 1.0, VOCAB)
    found.sum().backward()
    assert seen == [(slice(0, max(16, logps.LOGITS_PER_CHUNK // VOCAB)), False)]
    torch.testing.assert_close(tokens, head(states).argmin(-1, keepdim=True))


def test_no_rows_keep_the_graph():
    states = torch.randn(0, HIDDEN, requires_grad=True)
    found = logps.token_logps(states, torch.zeros(0, 1, dtype=torch.long), nn.Linear(HIDDEN, VOCAB), 1.0, VOCAB)
    assert found.shape == (0, 1) and found.requires_grad
