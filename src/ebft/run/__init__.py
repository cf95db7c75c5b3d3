"""A run from a config: data, model, trainer, checkpoints, Ctrl-C, the hub."""

from ebft.run.training import TrainResult, train

__all__ = ["TrainResult", "train"]
