"""Products by oneDNN are PyTorch's, values and gradients; and only those that suit it are taken."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from ebft.prefix import cpu


@pytest.fixture(autouse=True)
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
def test_linear_layers(bias, gradients):
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


def test_what_does_not_suit_is_left_to_pytorch(monkeypatch):
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
