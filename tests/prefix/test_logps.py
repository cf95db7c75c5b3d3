"""The head in chunks: values and gradients of the head at once, whatever the head does and whoever is trained."""

import pytest
import torch
from torch import nn

from ebft.prefix import logps
from ebft.prefix.logps import Head

ROWS, HIDDEN, VOCAB = 40, 6, 11


class Capped(nn.Module):
    """A head that keeps its logits for backward, and rules one token out."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, VOCAB)

    def forward(self, states):
        logits = 2 * torch.tanh(self.linear(states) / 2)
        return logits.index_fill(-1, torch.tensor([3]), float("-inf"))


@pytest.fixture(params=[1, 2**25], ids=["chunks", "whole"])
def chunks(request, monkeypatch):
    """16 rows at a time, the least, in tiles of one row; or everything at once."""
    monkeypatch.setattr(logps, "LOGITS_PER_CHUNK", {"cpu": request.param})
    monkeypatch.setattr(logps, "_SOFTMAX_PER_TILE", {"cpu": request.param})


def head_of(module):
    return Head(module, VOCAB, tuple(parameter for parameter in module.parameters() if parameter.requires_grad))


def inputs(k):
    torch.manual_seed(0)
    targets = torch.randint(4, VOCAB, (ROWS, k))
    return torch.randn(ROWS, HIDDEN, requires_grad=True), targets, torch.randn(ROWS, k)


@pytest.mark.parametrize("module", [nn.Linear(HIDDEN, VOCAB), Capped()], ids=["linear", "capped"])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("frozen", [True, False])
def test_values_and_gradients_are_those_of_the_head_at_once(module, k, frozen, chunks):
    head = head_of(module.requires_grad_(not frozen))
    states, targets, weight = inputs(k)
    wanted = [states, *(p for p in module.parameters() if p.requires_grad)]
    found = logps.token_logps(states, targets, head, 0.7)
    grads = torch.autograd.grad((found * weight).sum(), wanted)
    whole = (module(states) / 0.7).log_softmax(-1).gather(-1, targets)
    torch.testing.assert_close(found, whole)
    for ours, expected in zip(grads, torch.autograd.grad((whole * weight).sum(), wanted), strict=True):
        torch.testing.assert_close(ours, expected)


def test_a_head_that_drops_out_runs_again_with_the_same_dropout(monkeypatch):
    monkeypatch.setattr(logps, "LOGITS_PER_CHUNK", {"cpu": 1})
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(HIDDEN, VOCAB))
    states, targets, weight = inputs(2)
    wanted = [states, *module.parameters()]
    torch.manual_seed(1)
    found = logps.token_logps(states, targets, head_of(module), 0.7)
    torch.rand(7)  # whatever else draws in between
    grads = torch.autograd.grad((found * weight).sum(), wanted)
    torch.manual_seed(1)
    whole = torch.cat([(module(chunk) / 0.7).log_softmax(-1) for chunk in states.split(16)]).gather(-1, targets)
    torch.testing.assert_close(found, whole)
    for ours, expected in zip(grads, torch.autograd.grad((whole * weight).sum(), wanted)):
        torch.testing.assert_close(ours, expected)


def test_a_frozen_head_runs_once(monkeypatch):
    """Also where a gradient is wanted, which runs two products for each row: the logits and the states' gradient."""
    monkeypatch.setattr(logps, "LOGITS_PER_CHUNK", {"cpu": 1})
    module = nn.Linear(HIDDEN, VOCAB).requires_grad_(False)
    rows = []
    module.register_forward_hook(lambda module, args, out: rows.append(len(out)))
    states, targets, _ = inputs(1)
    logps.token_logps(states, targets, head_of(module), 1.0).sum().backward()
    assert rows == [16, 16, 8]


@pytest.mark.parametrize("module", [nn.Linear(HIDDEN, VOCAB), Capped()], ids=["linear", "capped"])
@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_of_what_was_chosen_attach_to_states_in_a_graph(module, frozen, chunks):
    """`choose` sees every row once, and the gradient is that of the token it chose."""
    head = head_of(module.requires_grad_(not frozen))
    states, _, weight = inputs(1)
    seen = []

    def choose(softmax, rows):
        seen.extend(range(ROWS)[rows])
        assert not softmax.probabilities.requires_grad
        return softmax.probabilities.argmax(-1, keepdim=True)

    scored = logps.choose_tokens(states.detach(), choose, head, 0.7, slopes=frozen)
    assert seen == list(range(ROWS))
    found = logps.with_gradient(states, scored, head, 0.7)
    wanted = [states, *head.trained]
    grads = torch.autograd.grad((found * weight).sum(), wanted)
    logp = (module(states) / 0.7).log_softmax(-1)
    torch.testing.assert_close(scored.tokens, logp.argmax(-1, keepdim=True))
    whole = logp.gather(-1, scored.tokens)
    torch.testing.assert_close(found, whole)
    for ours, expected in zip(grads, torch.autograd.grad((whole * weight).sum(), wanted), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("frozen", [True, False])
def test_no_rows_keep_the_graph(frozen):
    states = torch.randn(0, HIDDEN, requires_grad=True)
    head = head_of(nn.Linear(HIDDEN, VOCAB).requires_grad_(not frozen))
    found = logps.token_logps(states, torch.zeros(0, 1, dtype=torch.long), head, 1.0)
    assert found.shape == (0, 1) and found.requires_grad
