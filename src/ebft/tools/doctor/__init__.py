"""Checks before a run: the environment, the installation, a config, and the memory of one training step."""
