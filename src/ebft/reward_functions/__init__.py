"""Calls of the reward functions that users write: checked, some prompt groups at a time, or in worker processes."""
