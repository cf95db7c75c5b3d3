"""Linear layers on CPU: those that give their recorded products, and products by oneDNN, values and gradients."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from ebft.prefix import cpu

DOCUMENTS, STEPS, WIDTH = 5, (2, 4), 64  # documents' tokens, those of each step, features


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 70, bias=False), nn.Linear(70, WIDTH)

    def forward(self, x):
        return self.second(F.silu(self.first(x)))


def record(net, x):
    """Record the rows of x (1, P, WIDTH) as sampling computes them: the documents, then step by step."""
    recording = cpu.ActivationReuse(DOCUMENTS, most=9)
    with torch.no_grad():
        documents, *steps = x.split([DOCUMENTS, *STEPS], dim=1)
        with recording.of_documents():
            net(documents)
        for rows in steps:
            with recording.of_step(rows.shape[1]):
                net(rows)
    return recording


def tokens():
    torch.manual_seed(0)
    return torch.randn(1, DOCUMENTS + sum(STEPS), WIDTH, requires_grad=True)


@pytest.mark.parametrize("frozen", [None, "first", "second"])
def test_values_and_gradients_are_those_of_the_layers(frozen):
    net, x = Net(), tokens()
    if frozen:
        net.get_submodule(frozen).requires_grad_(False)
    plain = copy.deepcopy(net)
    recording = record(net, x)
    with recording.replayed():
        with FlopCounterMode(display=False) as counter:
            found = net(x)
        assert counter.get_total_flops() == 0
        torch.testing.assert_close(net(2 * x), plain(2 * x))  # a product is given once
    expected = plain(x)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    (found * weight).sum().backward()
    grad, x.grad = x.grad, None
    (expected * weight).sum().backward()
    torch.testing.assert_close(grad, x.grad)
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_layers_used_twice_and_incomplete_products_are_computed():
    """Which of two products belongs to which use is not known, so none is given."""

    class Twice(Net):
        def forward(self, x):
            return super().forward(super().forward(x))

    net, x = Net(), tokens()
    incomplete = cpu.ActivationReuse(DOCUMENTS, most=9)
    with torch.no_grad(), incomplete.of_documents():
        net(x[:, :DOCUMENTS])
    incomplete.of_step(sum(STEPS))
    twice = Twice()
    for recording, layers in ((record(twice, x), twice), (incomplete, net)):
        with recording.replayed():
            torch.testing.assert_close(layers(x), layers(x))


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_under_autocast(weights):
    """Products are in the type of autocast, gradients in that of the weights."""
    net, x = Net().to(weights), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        recording = record(net, x)
        torch.clear_autocast_cache()
        with recording.replayed():
            found = net(x)
        expected = net(x)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(y.float().square().sum(), [x, *net.parameters()]) for y in (found, expected)]
    for ours, theirs, given in zip(*grads, [x, *net.parameters()]):
        assert ours.dtype == theirs.dtype == given.dtype
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


def test_layers_that_pass_arguments_by_keyword_are_computed():
    """As adapters of PEFT do; a bias by keyword has a gradient, and outputs that are reused can be changed in place."""
    net, x = Net(), tokens()
    inner = net.second

    class ByKeyword(nn.Module):
        def forward(self, rows):
            first = F.linear(input=rows, weight=inner.weight, bias=inner.bias)
            first += F.linear(rows, inner.weight, bias=inner.bias)
            return first

    class InPlace(nn.Module):
        def forward(self, rows):
            result = inner(rows)
            result += rows.sum(-1, keepdim=True)
            return result

    for net.second in (ByKeyword(), InPlace()):
        with record(net, x).replayed():
            found = net(x)
        expected = net(x)
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad(out.square().sum(), [inner.weight, inner.bias, x]) for out in (found, expected)]
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


@pytest.fixture
def onednn(monkeypatch):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("PyTorch was built without oneDNN")
    monkeypatch.setattr(cpu, "_onednn_is_faster", lambda: True)
    monkeypatch.setattr(cpu, "SMALLEST", 0)


def by_onednn(run):
    """What `run` returns, and whether PyTorch's own products took no part in it."""
    with FlopCounterMode(display=False) as counter:
        result = run()
    return result, counter.get_total_flops() == 0


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_linear_layers(onednn, bias, gradients):
    torch.manual_seed(0)
    layer, x = nn.Linear(33, 17, bias=bias), torch.randn(1, 29, 33, requires_grad=True)

    def run():
        with cpu.cpu_matmul(torch.device("cpu")), torch.set_grad_enabled(gradients):
            return layer(x)

    found, taken = by_onednn(run)
    assert taken
    torch.testing.assert_close(found, layer(x))
    if gradients:
        wanted, weight = [x, *layer.parameters()], torch.randn_like(found)
        grads, taken = by_onednn(lambda: torch.autograd.grad((found * weight).sum(), wanted))
        assert taken
        for ours, expected in zip(grads, torch.autograd.grad((layer(x) * weight).sum(), wanted)):
            torch.testing.assert_close(ours, expected)


def test_what_does_not_suit_is_left_to_pytorch(onednn, monkeypatch):
    left, right = torch.randn(9, 21), torch.randn(9, 13)
    found, taken = by_onednn(lambda: cpu.cpu_product(left.mT, right))
    assert taken
    torch.testing.assert_close(found, left.mT @ right)
    x, weight = torch.randn(5, 8), torch.randn(3, 8)
    with cpu.cpu_matmul(torch.device("cpu")):
        for dtype in (torch.bfloat16, torch.float64):
            assert not by_onednn(lambda dtype=dtype: F.linear(x.to(dtype), weight.to(dtype)))[1]
        with torch.autocast("cpu", torch.bfloat16):
            assert F.linear(x, weight).dtype == torch.bfloat16
        monkeypatch.setattr(cpu, "SMALLEST", 5 * 3 * 8 + 1)
        assert not by_onednn(lambda: F.linear(x, weight))[1]
