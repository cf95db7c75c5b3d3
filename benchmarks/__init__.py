"""What one strided step takes, and what a published trainer takes for the same: `python -m benchmarks.strided_step`."""
