"""Monitoring: the console line and the throughput numbers."""

from ebft.monitor.console import ConsoleMetrics, ProgressBar, default_callbacks
from ebft.monitor.finite import StopOnNonFinite
from ebft.monitor.throughput import Throughput

__all__ = ["ConsoleMetrics", "ProgressBar", "StopOnNonFinite", "Throughput", "default_callbacks"]
