"""transformers' Trainer with complete checkpoints, exact continuation, and safe points to stop at.

Like transformers_internals.py, the files of this folder use private interfaces of transformers, which
tests/test_contracts.py checks against the installed release.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import Trainer

from ebft.errors import ConfigError
from ebft.trainer.resuming import ComparesRows
from ebft.trainer.stopping import StopsSafely


class HasLearningRates(Trainer):
    """Trainer whose optimizer has a group for each learning rate that `rate_of` returns for the names of parameters."""

    rate_of: Callable[[str], float] | None = None

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new and self.rate_of is not None:
            split_groups(optimizer, self.model if model is None else model, self.rate_of)
        return optimizer


def split_groups(optimizer: Optimizer, model: nn.Module, rate_of: Callable[[str], float]) -> None:
    """Split the groups of a new optimizer by learning rate; the schedule multiplies each of them.

    Groups with the learning rate of the optimizer are the first, since transformers logs the rate of the first group.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if any(id(parameter) not in names for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError(
            f"{type(optimizer).__name__} does not update the parameters of the model itself, so they cannot have "
            "learning rates of their own. Use optimizer: adamw_torch_fused, or remove lr_groups, embedding_lr, "
            "embedding_lr_scale and loraplus_lr_ratio."
        )
    found: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        by_rate: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_rate.setdefault(rate_of(names[id(parameter)]), []).append(parameter)
        found += [{**group, "params": parameters, "lr": rate} for rate, parameters in by_rate.items()]
    optimizer.param_groups[:] = sorted(found, key=lambda group: group["lr"] != optimizer.defaults["lr"])


__all__ = ["OverTrainer"]


class OverTrainer(HasLearningRates, StopsSafely, ComparesRows):
    """Trainer whose checkpoints are complete or absent, and which continues from one exactly, also after a stop.

    Subclasses extend `running_state` and `restore_running_state`, `save_shared` and `load_shared`.
    """
