"""Monitoring: the console line and the throughput numbers."""

from ebft.monitor.console import ConsoleMetrics, default_callbacks
from ebft.monitor.throughput import Throughput

__all__ = ["ConsoleMetrics", "Throughput", "default_callbacks"]
