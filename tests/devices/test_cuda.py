"""Flags of a GPU on models, tensors and machines that say they are CUDA, without one."""

from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
from torch.nn import functional as F

from ebft.machine import available_memory, total_memory
from ebft.prefix.attention import passes
from ebft.prefix.attention.tiles import AttentionScores
from ebft.prefix.parity import TOLERANCES, difference_and_tolerance
from ebft.tools.evaluation import run as evaluation
from ebft.tools.evaluation.result import machine_card
from ebft.transformers_internals import causal_mask_function


@pytest.mark.parametrize(("device", "dtype", "precision", "rough"), [
    ("cuda", torch.float32, "none", False), ("cuda", torch.float32, "ieee", False),
    ("cuda", torch.float32, "tf32", True), ("cuda", torch.bfloat16, "none", True),
    ("cpu", torch.float32, "tf32", False),
])  # fmt: skip
def test_tolerance_by_precision(device, dtype, precision, rough, monkeypatch):
    """As `tf32: true` of transformers sets it, after which `allow_tf32` cannot be read."""
    monkeypatch.setattr(torch.backends, "fp32_precision", precision)
    model = SimpleNamespace(device=torch.device(device), dtype=dtype)
    found = difference_and_tolerance(model, "states", torch.tensor([0.0, 1e-6, 1.0]))
    assert found == (pytest.approx(1e-6) if rough else 1.0, TOLERANCES[rough])


@pytest.mark.parametrize("spans", [[(0, 600)], [(0, 300), (300, 600)]])
def test_repeated_keys_are_grouped_heads(spans):
    """Values and gradients where no fused kernel takes grouped heads."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
    parts = [draw(2, 3, 600, 8), draw(2, 600, 8), draw(2, 600, 8)]
    found = []
    for takes in (True, False):
        with (
            patch.object(passes, "takes_grouped_heads", return_value=takes),
            patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as kernel,
        ):
            pattern = passes.MaskPattern(causal_mask_function)
            output = passes.document_attention(spans, *parts, pattern, AttentionScores(0.3), None)
        found.append((output, *torch.autograd.grad(output.square().sum(), parts)))
        assert [call.kwargs["enable_gqa"] for call in kernel.call_args_list] == [takes] * len(spans)
    torch.testing.assert_close(*found)


@pytest.fixture
def two_gpus(monkeypatch):
    values = {"is_available": True, "device_count": 2, "mem_get_info": (2**30, 2**33), "get_device_name": "a GPU"}
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)


def test_what_the_machine_has(two_gpus):
    assert available_memory() == available_memory("cuda:1") == (2**30, "a GPU")
    assert available_memory("auto") == (2**31, "2 GPUs") and available_memory("cpu")[1].startswith("this machine")
    assert total_memory() == (2**33, "a GPU") and machine_card(1.0)["device"] == "a GPU"


def test_samples_of_an_evaluation_leave_the_states_of_all_gpus(two_gpus):
    sampler = Mock(_settings=Mock(samples=1, seed=0))
    with patch("torch.random.fork_rng") as forked, patch("torch.manual_seed"), patch.object(evaluation, "roll_out"):
        evaluation.Completions.sample(sampler, [], "a document")
    assert [*forked.call_args.kwargs["devices"]] == [0, 1]
