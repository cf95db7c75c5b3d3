"""Small learning rates and 16-bit weights: what is said, and when."""

import warnings

import pytest
import torch
from torch import nn

from ebft.models.load import share_that_moves, warn_of_lost_steps


def layer(dtype, value=0.02, trained=True):
    model = nn.Linear(8, 8, bias=False).to(dtype)
    model.weight.data.fill_(value)
    return model.requires_grad_(trained)


def test_the_share_is_that_of_the_weights_that_a_step_changes():
    model = layer(torch.bfloat16)
    model.weight.data[:2] = 1e-5  # a quarter of them is small enough for steps of 1e-6
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1e-6
    assert model.weight.ne(before).float().mean() == 0.25
    model.weight.data = before
    assert share_that_moves(model, 1e-6) == 0.25
    assert share_that_moves(model, 1e-3) == 1.0
    assert model.weight.equal(before)


def test_steps_that_bfloat16_loses_are_warned_of():
    bfloat16, float32 = layer(torch.bfloat16), layer(torch.float32)
    with pytest.warns(UserWarning, match="learning_rate: 1e-06 .* changes 0.0% of them.*torch_dtype: float32"):
        warn_of_lost_steps(bfloat16, 1e-6)
    adapted = nn.Sequential(layer(torch.bfloat16, trained=False), float32)
    with warnings.catch_warnings(action="error"):
        for model, rate in ((bfloat16, 1e-3), (float32, 1e-6), (adapted, 1e-6)):
            warn_of_lost_steps(model, rate)
