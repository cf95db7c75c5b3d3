"""Weighted means over micro-batches, rates between two reports, and the peak memory."""

import pytest
import torch
from accelerate import Accelerator

from ebft.monitor.budget import Budget
from ebft.monitor.metrics import MeanMetrics, Throughput, read_numbers


def test_means_are_over_items_not_over_batches():
    metrics, one = MeanMetrics(), Accelerator(cpu=True)
    metrics.add("x", torch.tensor(2.0), torch.tensor(1))
    metrics.add("x", 4.0 * 3, 3)
    assert metrics.drain(one) == {"x": pytest.approx(3.5)} and metrics.drain(one) == {}
    metrics.add("x", 0.0, 0)  # nothing weighed has no mean
    assert metrics.drain(one) == {}


def test_numbers_are_read_in_their_order_and_without_rounding():
    numbers = [2, torch.tensor(0.1), torch.tensor(2**40 + 1), 0.25, torch.tensor(0.7, dtype=torch.float64)]
    assert read_numbers(numbers) == [2.0, torch.tensor(0.1).item(), 2.0**40 + 1, 0.25, 0.7]


def test_rates_cover_the_time_since_the_last_report():
    budget, one = Budget(), Accelerator(cpu=True)
    throughput = Throughput(budget)
    for seconds in (0.5, 1.5):
        throughput.add(seconds)
        budget.add(documents=2, generated_tokens=64)
        budget.gather(one)
    metrics = throughput.drain(one)
    assert metrics["throughput/documents_per_s"] == pytest.approx(2.0)
    assert metrics["throughput/generated_tokens_per_s"] == pytest.approx(64.0)
    assert 0.0 <= metrics["memory/peak_gib"] < 1024
    throughput.add(1.0)
    budget.add(documents=1, generated_tokens=8)
    budget.gather(one)
    assert throughput.drain(one)["throughput/generated_tokens_per_s"] == pytest.approx(8.0)
    assert throughput.drain(one) == Throughput(budget).drain(one) == {}
