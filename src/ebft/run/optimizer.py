"""Check that transformers can create the optimizer and the schedule of a config, by creating them for one weight.

transformers (and torch) is imported only if they differ from the defaults.
"""

import difflib

from ebft.config.schema import RunConfig
from ebft.errors import ConfigError


def check_optimizer(config: RunConfig) -> None:
    """Raise ConfigError for an unknown `optimizer` or `lr_scheduler`, a missing package, or invalid arguments."""
    keys = ("optimizer", "lr_scheduler", "lr_scheduler_kwargs")
    if all(getattr(config, key) == type(config).model_fields[key].default for key in keys):
        return
    from ebft.over_transformers import OptimizerNames, SchedulerType

    _check_name("optimizer", config.optimizer, [name.value for name in OptimizerNames])
    _check_name("lr_scheduler", config.lr_scheduler, [name.value for name in SchedulerType])
    _try_optimizer(config)
    _try_schedule(config)


def _check_name(key: str, name: str, known: list[str]) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Leave {key} out to use {_default(key)}."
    raise ConfigError(f"{key}: {name!r} is not known to transformers. {hint}")


def _default(key: str) -> str:
    return RunConfig.model_fields[key].default


def _try_optimizer(config: RunConfig) -> None:
    from transformers import Trainer, TrainingArguments

    try:
        Trainer.get_optimizer_cls_and_kwargs(TrainingArguments(optim=config.optimizer, use_cpu=True, report_to="none"))
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"optimizer: {config.optimizer} cannot be used: {error}. Install its dependencies, or leave optimizer out "
            f"to use {_default('optimizer')}."
        ) from error


def _try_schedule(config: RunConfig) -> None:
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate)
    kwargs = config.lr_scheduler_kwargs
    try:
        get_scheduler(config.lr_scheduler, optimizer, 1, 10, scheduler_specific_kwargs=dict(kwargs) if kwargs else None)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"lr_scheduler: {config.lr_scheduler} with lr_scheduler_kwargs: {kwargs or '{}'} is invalid: {error}."
        ) from error
