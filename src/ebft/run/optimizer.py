"""Check that transformers can create the optimizer and the schedule of a config.

The names listed below need no check. For all others, transformers (and torch) is imported, and they are created for one
weight.
"""

from typing import Any

from ebft.errors import ConfigError, MissingPackageError, doing
from ebft.run.config.schema import RunConfig

# Without optim_args and lr_scheduler_kwargs.
_PLAIN = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
_PLAIN_SCHEDULES = (
    *("linear", "cosine", "cosine_with_restarts", "constant", "constant_with_warmup", "inverse_sqrt"),
    *("reduce_lr_on_plateau", "greedy"),
)
_IN_BACKWARD = (
    "it updates weights during the backward pass, so that gradients are neither accumulated, clipped nor checked"
)
_REFUSED = {  # by the start of their names
    **dict.fromkeys(("lomo", "adalomo"), _IN_BACKWARD),
    "grokadamw": "its state is not part of checkpoints, from which runs could not be resumed",
    **dict.fromkeys(
        ("galore", "apollo"),
        "its projections cannot be read from checkpoints, from which runs could not be resumed",
    ),
}


def check_optimizer(config: RunConfig) -> None:
    """Raise ConfigError for what would not train as configured; transformers raises for unknown names and arguments."""
    name = config.optimizer
    reason = next((reason for start, reason in _REFUSED.items() if name.startswith(start)), None)
    if name.endswith("layerwise"):
        reason = _IN_BACKWARD
    if reason is not None:
        raise ConfigError(f"optimizer: {name} is not supported: {reason}. Use adamw_torch_8bit to save memory.")
    if name not in _PLAIN or config.optim_args:
        _try_optimizer(config)
    if config.lr_scheduler not in _PLAIN_SCHEDULES or config.lr_scheduler_kwargs:
        _try_schedule(config)


def optimizer_arguments(optim_args: dict[str, Any] | None) -> str | None:
    """`optim_args` as transformers reads them."""
    return ",".join(f"{name}={value}" for name, value in (optim_args or {}).items()) or None


def _try_optimizer(config: RunConfig) -> None:
    given = config.optim_args or {}
    try:
        with doing(f"creating optimizer: {config.optimizer} with optim_args: {given}"):
            settings, plain = _settings(config.optimizer, given), _settings(config.optimizer, {})
    except ImportError as error:
        raise MissingPackageError(f"optimizer: {config.optimizer}: {error}") from error
    for name, value in given.items():
        is_text = isinstance(settings.get(name), str) and not isinstance(plain.get(name, ""), str)
        without = {other: each for other, each in given.items() if other != name}
        try:  # whether other values give another optimizer than none
            is_read = any(
                _settings(config.optimizer, {**without, name: each}) != _settings(config.optimizer, without)
                for each in (7, 11)
            )
        except ValueError:
            is_read = True
        if is_text or (value is False and settings.get(name)) or not is_read:
            raise ConfigError(
                f"optim_args.{name}: transformers does not read {value} for optimizer: {config.optimizer}. Remove it."
            )


def _settings(name: str, optim_args: dict[str, Any]) -> dict[str, Any]:
    """The arguments with which transformers creates an optimizer, without the weights."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        optim=name, optim_args=optimizer_arguments(optim_args), use_cpu=True, report_to="none"
    )
    return Trainer.get_optimizer_cls_and_kwargs(arguments)[1]


def _try_schedule(config: RunConfig) -> None:
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate)
    kwargs = config.lr_scheduler_kwargs
    if kwargs and config.lr_scheduler.startswith("constant"):
        raise ConfigError(f"lr_scheduler: {config.lr_scheduler} reads no lr_scheduler_kwargs. Remove them.")
    with doing(f"creating lr_scheduler: {config.lr_scheduler} with lr_scheduler_kwargs: {kwargs or '{}'}"):
        get_scheduler(config.lr_scheduler, optimizer, 1, 10, scheduler_specific_kwargs=dict(kwargs) if kwargs else None)
