"""Check that transformers can create the optimizer and the schedule of a config.

Those in the tables below are known to be created, without other packages. For all others, transformers (and torch) is
imported, and they are created for one weight.
"""

from typing import Any

from ebft.errors import ConfigError, MissingPackageError, doing
from ebft.run.config.schema import RunConfig

# Optimizers of PyTorch and transformers, with the numbers in optim_args that they read.
_PLAIN = {
    "adamw_torch": (),
    "adamw_torch_fused": (),
    "adafactor": (),
    "sgd": ("momentum", "dampening", "weight_decay"),
    "adagrad": ("lr_decay", "weight_decay", "eps"),
    "rmsprop": ("momentum", "alpha", "eps", "weight_decay"),
}
# Schedules: one of the first numbers in lr_scheduler_kwargs is required, the second are optional.
SCHEDULES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": ((), ()),
    "cosine": ((), ("num_cycles",)),
    "cosine_with_restarts": ((), ("num_cycles",)),
    "polynomial": ((), ("power",)),
    "constant": ((), ()),
    "constant_with_warmup": ((), ()),
    "inverse_sqrt": ((), ("timescale",)),
    "reduce_lr_on_plateau": ((), ()),
    "cosine_with_min_lr": (("min_lr", "min_lr_rate"), ("num_cycles",)),
    "cosine_warmup_with_min_lr": (("min_lr", "min_lr_rate"), ("num_cycles", "warmup_lr_rate")),
    "warmup_stable_decay": (("num_decay_steps",), ("min_lr_ratio", "num_cycles")),
    "greedy": ((), ()),
}
_LR_END = 1e-7  # of the schedule polynomial, which is refused for smaller learning rates
_IN_BACKWARD = ("lomo", "adalomo")  # and names that end in layerwise
_OTHER_NAMES = {
    "ao_adamw_4bit": "adamw_torch_4bit",
    "ao_adamw_8bit": "adamw_torch_8bit",
    "adamw_hf": "adamw_torch",
    "adamw_apex_fused": "adamw_torch_fused",
    "lion_pytorch": "lion_32bit",
}
_REFUSED = {  # by the start of their names
    "grokadamw": "its state is not part of checkpoints, from which runs could not be resumed. Use adamw_torch_fused",
    **dict.fromkeys(
        ("galore", "apollo"),
        "its projections cannot be read from checkpoints, from which runs could not be resumed. Use adamw_torch_8bit "
        "to save memory",
    ),
    "ao_adamw_fp8": "transformers creates torchao's optimizers with 8 and 4 bits only. Use adamw_torch_8bit",
    **dict.fromkeys(
        ("muon", "dion"),
        "transformers has no optimizer that treats matrices and other weights differently. Use adamw_torch_fused",
    ),
    "came_pytorch": "transformers cannot create CAME. Use adafactor, whose second moments are factored as well, or "
    "adamw_torch_8bit to save memory",
    "adopt_adamw": "transformers cannot create ADOPT. Use adamw_torch_fused",
    "optimi_adamw": "of the package torch-optimi, transformers creates stable_adamw only. Use it, or adamw_torch_fused",
}
_REFUSED_SCHEDULES = {
    "rex": "transformers has no REX schedule. Use lr_scheduler: polynomial with lr_scheduler_kwargs: {power: 0.5}, "
    "whose learning rate stays high for longer than with linear, too",
    "one_cycle": "transformers has no one-cycle schedule. Use lr_scheduler: cosine with warmup_ratio: 0.3, which also "
    "rises and falls, without a cycle of the momentum",
}


def check_optimizer(config: RunConfig) -> None:
    """Raise ConfigError for what would not train as configured; transformers raises for unknown names and arguments."""
    _check_supported(config.optimizer)
    if config.lr_scheduler in _REFUSED_SCHEDULES:
        reason = _REFUSED_SCHEDULES[config.lr_scheduler]
        raise ConfigError(f"lr_scheduler: {config.lr_scheduler} is not supported: {reason}.")
    given, known = config.optim_args or {}, _PLAIN.get(config.optimizer)
    if known is None or not _are_numbers(given) or not given.keys() <= set(known):
        _try_optimizer(config)
    if not _is_plain_schedule(config):
        _try_schedule(config)


def _is_plain_schedule(config: RunConfig) -> bool:
    given = config.lr_scheduler_kwargs or {}
    too_small = config.lr_scheduler == "polynomial" and config.learning_rate <= _LR_END
    if config.lr_scheduler not in SCHEDULES or too_small:
        return False
    one_of, optional = map(set, SCHEDULES[config.lr_scheduler])
    return _are_numbers(given) and len(given.keys() & one_of) == bool(one_of) and given.keys() <= one_of | optional


def _are_numbers(values: dict[str, Any]) -> bool:
    return all(type(value) in (int, float) for value in values.values())


def optimizer_arguments(optim_args: dict[str, Any] | None) -> str | None:
    """`optim_args` as transformers reads them."""
    return ",".join(f"{name}={value}" for name, value in (optim_args or {}).items()) or None


def _check_supported(name: str) -> None:
    """Check that the optimizer works as runs need it."""
    if name in _OTHER_NAMES:
        raise ConfigError(f"optimizer: {name} is called {_OTHER_NAMES[name]} in transformers.")
    if name in _IN_BACKWARD or name.endswith("layerwise"):
        raise ConfigError(
            f"optimizer: {name} is not supported: it updates weights during the backward pass, so that gradients are "
            "neither accumulated, clipped nor checked. Use adamw_torch_8bit to save memory."
        )
    reason = next((reason for start, reason in _REFUSED.items() if name.startswith(start)), None)
    if reason is not None:
        raise ConfigError(f"optimizer: {name} is not supported: {reason}.")


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
