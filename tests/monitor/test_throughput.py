"""Rates between two reports, and the peak memory."""

import pytest

from ebft.monitor import Throughput


def test_rates_cover_the_time_since_the_last_report():
    throughput = Throughput()
    throughput.add(documents=2, generated_tokens=64, seconds=0.5)
    throughput.add(documents=2, generated_tokens=64, seconds=1.5)
    metrics = throughput.drain()
    assert metrics["throughput/documents_per_s"] == pytest.approx(2.0)
    assert metrics["throughput/generated_tokens_per_s"] == pytest.approx(64.0)
    throughput.add(documents=1, generated_tokens=8, seconds=1.0)
    assert throughput.drain()["throughput/generated_tokens_per_s"] == pytest.approx(8.0)


def test_nothing_done_gives_nothing():
    assert Throughput().drain() == {}


def test_peak_memory_is_plausible():
    throughput = Throughput()
    throughput.add(documents=1, seconds=1.0)
    assert 0.0 <= throughput.drain()["memory/peak_gib"] < 1024
