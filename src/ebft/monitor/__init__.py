"""Monitoring of training: console output, throughput and the compute budget."""

from ebft.monitor.budget import StopAtBudget, limit_reached, spent_at
from ebft.monitor.console_metrics import ConsoleMetrics, ProgressBar
from ebft.monitor.metrics import Throughput

__all__ = [
    "ConsoleMetrics",
    "ProgressBar",
    "StopAtBudget",
    "Throughput",
    "limit_reached",
    "spent_at",
]
