"""Monitoring of training: console output, throughput and the compute budget."""
