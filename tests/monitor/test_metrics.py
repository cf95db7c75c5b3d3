"""Weighted means over micro-batches, rates between two reports, and the peak memory."""

import pytest
import torch
from accelerate import Accelerator

from ebft.monitor import Throughput
from ebft.monitor.metrics import MeanMetrics

ONE = Accelerator(cpu=True)


def test_means_are_over_items_not_over_batches():
    metrics = MeanMetrics()
    metrics.add("x", torch.tensor(2.0), torch.tensor(1))
    metrics.add("x", 4.0 * 3, 3)
    assert metrics.drain(ONE) == {"x": pytest.approx(3.5)} and metrics.drain(ONE) == {}
    metrics.add("x", 0.0, 0)  # nothing weighed has no mean
    assert metrics.drain(ONE) == {}


def test_rates_cover_the_time_since_the_last_report():
    throughput = Throughput()
    for seconds in (0.5, 1.5):
        throughput.add(documents=2, generated_tokens=64, seconds=seconds)
    metrics = throughput.drain(ONE)
    assert metrics["throughput/documents_per_s"] == pytest.approx(2.0)
    assert metrics["throughput/generated_tokens_per_s"] == pytest.approx(64.0)
    assert 0.0 <= metrics["memory/peak_gib"] < 1024
    throughput.add(documents=1, generated_tokens=8, seconds=1.0)
    assert throughput.drain(ONE)["throughput/generated_tokens_per_s"] == pytest.approx(8.0)
    assert throughput.drain(ONE) == Throughput().drain(ONE) == {}
