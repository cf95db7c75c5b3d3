"""Weighted means over micro-batches."""

import pytest
import torch

from ebft.monitor.metrics import MeanMetrics


def test_means_are_over_items_not_over_batches():
    metrics = MeanMetrics()
    metrics.add("x", torch.tensor(2.0), torch.tensor(1))
    metrics.add("x", 4.0 * 3, 3)
    assert metrics.drain() == {"x": pytest.approx(3.5)}
    assert metrics.drain() == {}


def test_nothing_weighed_has_no_mean():
    metrics = MeanMetrics()
    metrics.add("x", 0.0, 0)
    assert metrics.drain() == {}
