"""The head in chunks: values and gradients of the head at once, whatever the head does and whoever is trained."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ebft.prefix import logps, sampling
from ebft.prefix.logps import Float32Results, Head, Linear
from ebft.prefix.sampling import Softmax, Truncation

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
    """16 rows at a time, the least, in tiles of one row, and blocks of 4 tokens in backward; or everything at once."""
    monkeypatch.setattr(logps, "LOGITS_PER_CHUNK", {"cpu": request.param})
    monkeypatch.setattr(sampling, "_SOFTMAX_PER_TILE", {"cpu": request.param})
    monkeypatch.setattr(logps, "_TOKENS_PER_BLOCK", {"cpu": 4 if request.param == 1 else VOCAB})
    monkeypatch.setattr(logps, "_ROWS_PER_BLOCK", {"cpu": 16 if request.param == 1 else ROWS})


def head_of(module):
    trained = tuple(parameter for parameter in module.parameters() if parameter.requires_grad)
    is_linear = type(module) is nn.Linear
    return Head(module, VOCAB, trained, Linear(module.weight, module.bias) if is_linear else None)


def close_gradients(found, whole, wanted):
    """The gradients of two values that should be equal, for each of `wanted`."""
    for ours, theirs in zip(torch.autograd.grad(found, wanted), torch.autograd.grad(whole, wanted), strict=True):
        torch.testing.assert_close(ours, theirs)


class General(nn.Linear):
    """A linear layer whose weights the head does not name."""


MODULES = {"linear": nn.Linear(HIDDEN, VOCAB), "linear without bias": nn.Linear(HIDDEN, VOCAB, bias=False),
           "general": General(HIDDEN, VOCAB), "capped": Capped()}  # fmt: skip
CASES = [(name, frozen) for name in MODULES for frozen in (True, False)]
EACH_HEAD = pytest.mark.parametrize(("module", "frozen"), CASES)


def inputs(k):
    torch.manual_seed(0)
    targets = torch.randint(4, VOCAB, (ROWS, k))
    return torch.randn(ROWS, HIDDEN, requires_grad=True), targets, torch.randn(ROWS, k)


TRUNCATIONS = [{"top_k": 3}, {"top_k": VOCAB + 5}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 6, "top_p": 0.7}]
TRUNCATIONS += [{"min_p": 0.1, "top_k": 5, "top_p": 0.8}]


def truncated(logits, targets, min_p=0.0, top_k=0, top_p=1.0):
    """Log-probabilities (R, V) with transformers' warpers in vLLM's order, which always keep the targets (R, K)."""
    warpers = LogitsProcessorList()
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    kept = warpers(None, logits.detach()).isfinite().scatter(-1, targets, True)
    return logits.masked_fill(~kept, -torch.inf).log_softmax(-1)


OF_EACH_HEAD = [(*case, k, {}) for case in CASES for k in (1, 2, 7)]  # of 7 tokens, so that rows have some twice
OF_EACH_HEAD += [("linear", frozen, k, options) for frozen in (True, False) for k in (1, 2) for options in TRUNCATIONS]


@pytest.mark.parametrize(("module", "frozen", "k", "options"), OF_EACH_HEAD, ids=str)
def test_values_and_gradients_are_those_of_the_head_at_once(module, frozen, k, options, chunks):
    module = MODULES[module].requires_grad_(not frozen)
    head, kept = head_of(module), Truncation(**options) if options else None
    states, targets, weight = inputs(k)
    found = logps.token_logps(states, targets, head, 0.7, kept)
    whole = truncated(module(states) / 0.7, targets, **options).gather(-1, targets)
    torch.testing.assert_close(found, whole)
    close_gradients((found * weight).sum(), (whole * weight).sum(), [states, *head.trained])
    with torch.no_grad():
        torch.testing.assert_close(logps.token_logps(states, targets, head, 0.7, kept), whole.detach())
    nothing = logps.token_logps(states[:0], targets[:0], head, 1.0)
    assert nothing.shape == (0, k) and nothing.requires_grad
    assert not any(grad.any() for grad in torch.autograd.grad(nothing.sum(), [states, *head.trained]))


@pytest.mark.parametrize("several", [0, 9, ROWS + 1])
@pytest.mark.parametrize("module", MODULES)
def test_rows_that_repeat_their_first_token_need_not_be_looked_for(module, several, chunks):
    module = MODULES[module].requires_grad_(False)
    states, targets, weight = inputs(4)
    targets[several:] = targets[several:, :1].clone()
    found = logps.token_logps(states, targets, head_of(module), 0.7, several=several)
    whole = (module(states) / 0.7).log_softmax(-1).gather(-1, targets)
    torch.testing.assert_close(found, whole)
    close_gradients((found * weight).sum(), (whole * weight).sum(), [states])


@pytest.mark.parametrize("options", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_entropies_of_truncated_distributions(options, with_gradient, frozen, chunks):
    module = nn.Linear(HIDDEN, VOCAB).requires_grad_(not frozen)
    states, targets, weight = inputs(1)
    targets, weight, head = targets[:, 0], weight[:, 0], head_of(module)
    found, entropies = logps.token_logps_and_entropy(states, targets, head, 0.7, with_gradient, Truncation(**options))
    whole = truncated(module(states) / 0.7, targets[:, None], **options)
    expected = -(whole.exp() * whole.clamp_min(-1e9)).sum(-1)
    torch.testing.assert_close(entropies, expected)
    expected = expected if with_gradient else expected.detach()
    total = ((whole.gather(-1, targets[:, None])[:, 0] + 0.5 * expected) * weight).sum()
    close_gradients(((found + 0.5 * entropies) * weight).sum(), total, [states, *head.trained])


@pytest.mark.parametrize("options", [{}, {"top_p": 0.6}], ids=str)
def test_entropies_under_autocast_are_in_float32(options):
    logits = 3 * torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        found = Softmax(logits, 0.7, Truncation(**options)).entropy()
    whole = truncated(logits.double() / 0.7, logits.argmax(-1, keepdim=True), **options)
    torch.testing.assert_close(found, -(whole.exp() * whole.clamp_min(-1e9)).sum(-1, keepdim=True).float())
    # A truncation that keeps every token is none.
    assert Truncation.of(0, 1.0, None) is Truncation.of(None, 1.0, 0.0) is Truncation.of(-1, 1.0, None) is None
    assert Truncation.of(5, 1.0, None) == Truncation(top_k=5)


def test_a_head_that_drops_out_runs_again_with_the_same_dropout(monkeypatch):
    monkeypatch.setattr(logps, "LOGITS_PER_CHUNK", {"cpu": 1})
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(HIDDEN, VOCAB))
    states, targets, weight = inputs(2)
    torch.manual_seed(1)
    found = logps.token_logps(states, targets, head_of(module), 0.7)
    torch.manual_seed(1)
    whole = torch.cat([(module(chunk) / 0.7).log_softmax(-1) for chunk in states.split(16)]).gather(-1, targets)
    torch.testing.assert_close(found, whole)
    torch.rand(7)  # whatever else draws in between
    close_gradients((found * weight).sum(), (whole * weight).sum(), [states, *module.parameters()])


@EACH_HEAD
@pytest.mark.parametrize("k", [1, 4])
def test_gradients_of_what_was_chosen_attach_to_states_in_a_graph(module, k, frozen, chunks):
    """`choose` sees every row once, and the gradient is that of the tokens it chose, some of them several times."""
    module = MODULES[module].requires_grad_(not frozen)
    head = head_of(module)
    states, _, weight = inputs(k)
    seen = []

    def choose(sampling, rows):
        seen.extend(range(ROWS)[rows])
        assert not sampling.probabilities.requires_grad
        return sampling.probabilities.topk(2).indices[:, [0, 1, 0, 0][:k]]

    scored = logps.choose_tokens(states.detach(), choose, head, 0.7, slopes=head.gives_slopes(k))
    assert seen == list(range(ROWS))
    found = logps.with_gradient(states, scored, head, 0.7)
    logp = (module(states) / 0.7).log_softmax(-1)
    torch.testing.assert_close(scored.tokens, logp.topk(2).indices[:, [0, 1, 0, 0][:k]])
    whole = logp.gather(-1, scored.tokens)
    torch.testing.assert_close(found, whole)
    close_gradients((found * weight).sum(), (whole * weight).sum(), [states, *head.trained])


@EACH_HEAD
def test_rows_with_unequal_numbers_of_tokens_are_joined(module, frozen, chunks):
    module = MODULES[module].requires_grad_(not frozen)
    head = head_of(module)
    states, targets, weight = inputs(3)
    counts = [1, 3, 2]
    parts = [
        logps.choose_tokens(x, lambda sampling, rows, t=t, n=n: t[rows, :n], head, 0.7, head.gives_slopes(max(counts)))
        for x, t, n in zip(states.detach().tensor_split([5, 25]), targets.tensor_split([5, 25]), counts)
    ]
    found = logps.with_gradient(states, logps.Scored.joined(parts), head, 0.7)
    weight *= torch.arange(3) < torch.tensor(counts).repeat_interleave(torch.tensor([5, 20, ROWS - 25]))[:, None]
    whole = (module(states) / 0.7).log_softmax(-1).gather(-1, targets)
    torch.testing.assert_close(found * weight, whole * weight)
    close_gradients((found * weight).sum(), (whole * weight).sum(), [states, *head.trained])


@pytest.fixture(params=["blocks", "library"])
def sums(request, monkeypatch):
    """Float32 results of 16-bit products: from blocks in float32, or from the library, as on a GPU."""
    if request.param == "library":
        mm = torch.mm

        def of_gpu(left, right, out_dtype=None):
            with torch.autocast("cpu", enabled=False):
                return mm(left, right) if out_dtype is None else mm(left.to(out_dtype), right.to(out_dtype))

        monkeypatch.setattr(torch, "mm", of_gpu)
        monkeypatch.setattr(logps, "_sums_in_float32", lambda device_type, dtype: True)


ROUNDED = [(*case, options, *types) for case in CASES for options in ({}, {"top_k": 5})
           for types in ((torch.bfloat16, False), (torch.float32, True))]  # fmt: skip


@pytest.mark.first(16)
@pytest.mark.parametrize(("name", "frozen", "options", "dtype", "autocast"), ROUNDED, ids=str)
def test_logits_of_16_bit_inputs_are_not_rounded(name, frozen, options, dtype, autocast, chunks, sums):
    """Twin: the head in float64, of states and weights that are rounded to bfloat16. Logits are up to 50."""
    torch.manual_seed(0)
    module = copy.deepcopy(MODULES[name]).to(dtype).requires_grad_(not frozen)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn_like(weight) * 8)
    states, targets, weight = inputs(3)
    states, weight = states.detach().to(dtype).requires_grad_(), weight / 8
    bare, kept = head_of(module), Truncation(**options) if options else None
    results = Float32Results()

    def logits(x):
        with results:
            return module(x)

    head = replace(bare, logits=logits)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = logps.token_logps(states, targets, head, 0.7, kept)
        entropies = logps.token_logps_and_entropy(states, targets[:, 0], head, 0.7, True, kept)[1]
        scored = logps.choose_tokens(states.detach(), lambda softmax, rows: targets[rows], head, 0.7, known=targets)
        grads = torch.autograd.grad((found * weight).sum() + entropies.sum(), [states, *head.trained])
    twin = copy.deepcopy(module).double()
    rounded = lambda tensor: tensor.detach().bfloat16().double()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.copy_(rounded(parameter) if parameter.dim() == 2 else parameter)
    x = rounded(states).requires_grad_()
    whole = truncated(twin(x) / 0.7, targets, **options)
    expected = whole.gather(-1, targets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected.float(), atol=2e-5, rtol=2e-6)
    first = truncated(twin(x) / 0.7, targets[:, :1], **options)
    exact = -(first.exp() * first.clamp_min(-1e9)).sum(-1)
    torch.testing.assert_close(entropies, exact.float(), atol=2e-5, rtol=2e-6)
    if not options:  # what is sampled is what is scored
        torch.testing.assert_close(scored.logps, found.detach(), atol=1e-6, rtol=0)
    wanted = [x, *(each for each in twin.parameters() if each.requires_grad)]
    for ours, theirs in zip(grads, torch.autograd.grad((expected * weight).sum() + exact.sum(), wanted), strict=True):
        assert ours.dtype == dtype and (ours.double() - theirs).norm() < 6e-3 * theirs.norm()


def test_rounded_weights_of_autocast_follow_their_weights(sums):
    """Also the weights of an adapter, which has two layers, and after a step of the optimizer."""
    module, results = nn.Sequential(nn.Linear(HIDDEN, 4), nn.Linear(4, VOCAB)), Float32Results()
    x = torch.randn(1, ROWS, HIDDEN)
    for _ in range(3):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            with results:
                found, again = module(x), module(x)
            rounded = [weight.bfloat16().float() for weight in (module[0].weight, module[1].weight)]
            with torch.autocast("cpu", enabled=False):
                hidden = x.bfloat16().float() @ rounded[0].T + module[0].bias
                expected = hidden.bfloat16().float() @ rounded[1].T + module[1].bias
            assert found.dtype == torch.float32 and found.equal(again)
            torch.testing.assert_close(found, expected)
            module[0].weight += 1
    with results:
        assert module(x).equal(module[1](module[0](x)))  # in float32, nothing changes
