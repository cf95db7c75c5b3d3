"""Monitoring of training: console output, throughput and the compute budget."""

from ebft.monitor.budget import CountsBudget, StopAtBudget, limit_reached, spent_at
from ebft.monitor.metrics import ConsoleMetrics, ProgressBar, Throughput
from ebft.trainer.stopping import StopOnNonFinite

__all__ = [
    "ConsoleMetrics",
    "CountsBudget",
    "ProgressBar",
    "StopAtBudget",
    "StopOnNonFinite",
    "Throughput",
    "limit_reached",
    "spent_at",
]
