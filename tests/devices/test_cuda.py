"""Flags of a GPU on models, tensors and machines that say they are CUDA, without one."""

from types import SimpleNamespace

import pytest
import torch

from ebft.prefix.parity import TOLERANCES, difference_and_tolerance


@pytest.mark.parametrize(
    ("device", "dtype", "precision", "rough"),
    [
        ("cuda", torch.float32, "none", False),
        ("cuda", torch.float32, "ieee", False),
        ("cuda", torch.float32, "tf32", True),
        ("cuda", torch.bfloat16, "none", True),
        ("cuda", torch.float16, "ieee", True),
        ("cpu", torch.float32, "tf32", False),
    ],
)
def test_tolerance_by_precision(device, dtype, precision, rough, monkeypatch):
    """As `tf32: true` of transformers sets it, after which `allow_tf32` cannot be read."""
    monkeypatch.setattr(torch.backends, "fp32_precision", precision)
    model = SimpleNamespace(device=torch.device(device), dtype=dtype)
    found = difference_and_tolerance(model, "states", torch.tensor([0.0, 1e-6, 1.0]))
    assert found == (pytest.approx(1e-6) if rough else 1.0, TOLERANCES[rough])
