"""Monitoring of training: console output, throughput and the compute budget."""

from ebft.monitor.budget import StopAtBudget, limit_reached, spent_at
from ebft.monitor.metrics import ConsoleMetrics, ProgressBar, Throughput

__all__ = ["ConsoleMetrics", "ProgressBar", "StopAtBudget", "Throughput", "limit_reached", "spent_at"]
