"""Checks that a valid config can be trained, in three stages.

1. On the config, the files that it names and the installed packages, without torch: `check_runnable`.
2. On the machine: `check_machine`.
3. On the rows and the model: `check_same_everywhere` and `check_adapted_experts`. Checks of rows by a method, and of
   memory and disk space, are in training.py and checkpoints.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sized
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebft.catalog import lasting_name
from ebft.config.rules import INTERACTIVE, refuse
from ebft.config.section import flat_settings
from ebft.data.transforms import built_in, check_transform
from ebft.errors import ConfigError, MissingPackageError, doing, shortened, warn
from ebft.files import json_hash
from ebft.machine import Machine
from ebft.methods.base_config import check_deepspeed
from ebft.run.config.combinations import expert_problems
from ebft.run.config.schema import RunConfig
from ebft.run.output import check_own

if TYPE_CHECKING:
    from torch import nn


def check_machine(config: RunConfig, machine: Machine) -> None:
    """Raise ConfigError, with an alternative, for settings that this machine does not support."""
    problems = list(config.method.problems_here(config, machine))
    if config.deepspeed is not None and not machine.has_accelerator:
        problems.append("deepspeed requires GPUs. Remove it to use DDP, or set fsdp: true, which also runs on CPU.")
    if config.fsdp and machine.processes == 1:
        problems.append("fsdp needs several processes (ebft train CONFIG --num-processes 2), but only one runs.")
    if config.fp8 and not machine.supports_float8:
        problems.append("fp8 needs a GPU of compute capability 8.9 (Ada, Hopper or newer). Set bf16: true instead.")
    if problems:
        raise ConfigError("\n".join(problems))
    if config.tf32 is True and not machine.supports_tf32:
        warn("tf32: true has no effect: it requires an Ampere or newer GPU, which this machine does not have.")
    if config.activation_offloading and not machine.has_accelerator:
        warn("activation_offloading: true has no effect on CPU: activations are in main memory.")
    missing = list(_missing_on_gpus(config)) if machine.has_accelerator else []
    if missing:
        raise MissingPackageError("\n".join(missing))


def check_runnable(config: RunConfig, processes: int | None = None, *, elsewhere: bool = False) -> None:
    """Raise ConfigError or DataError, with an alternative, for a valid config that cannot be trained.

    `processes`: the number of processes that will train; None: as many as in the launch of this process.
    `elsewhere`: training may run on another machine, so packages that are missing here are warnings, and the number of
    processes is not checked.
    """
    problems = list(config.method.problems(config))
    if not elsewhere:
        count = launched_processes() if processes is None else processes
        if config.dp_shard_size not in (None, 1, count):
            problems.append(f"dp_shard_size: {config.dp_shard_size}, but the model is sharded over {count} processes.")
        if config.ddp is False and count > 1:
            problems.append(f"ddp: false, but the number of processes is {count}. Remove ddp.")
    if problems := problems + list(_overwritten(config)):
        raise ConfigError("\n".join(problems))
    if config.evaluation.pass_at:
        config.evaluation.counts(config.method.sampling(config).samples)  # raises
    check_types(config)
    check_own(config)
    missing = list(config.method.missing_packages(config))
    if config.use_ray and find_spec("ray") is None:
        missing.append("use_ray requires the package ray: pip install 'ebft[ray]'")
    for check in (check_deepspeed, check_optimizer):
        try:
            check(config)
        except MissingPackageError as error:
            missing += str(error).split("\n")
    if config.plugins:
        from ebft.run.plugins import find_plugin  # imports transformers

        for name in config.plugins:
            find_plugin(name)
    if missing and not elsewhere:
        raise MissingPackageError("\n".join(missing))
    for message in missing:
        warn(f"Needed for training: {message}")
    for message in _missing_on_gpus(config) if elsewhere else ():
        warn(f"Needed for training on a GPU: {message}")


def _missing_on_gpus(config: RunConfig) -> Iterator[str]:
    """Packages that are not installed and that a run needs on GPUs only, one message each."""
    for key in ("load_in_4bit", "load_in_8bit"):
        if getattr(config, key) and find_spec("bitsandbytes") is None:
            yield f"{key} requires the package bitsandbytes: pip install 'ebft[qlora]'. Or remove it."
    yield from config.method.missing_on_gpus(config)


def launched_processes() -> int:
    """The number of processes of the launch to which this process belongs; 1 without a launcher.

    Without LOCAL_RANK, accelerate trains in one process, also if a job scheduler has set WORLD_SIZE.
    """
    with doing("reading WORLD_SIZE, which launchers set with LOCAL_RANK"):
        return int(os.environ["WORLD_SIZE"]) if "LOCAL_RANK" in os.environ else 1


def imported_names(config: RunConfig) -> list[str]:
    """The functions and classes of the user, as module.name, whose modules `check_runnable` imports."""
    transforms = [entry.type for entry in (*config.datasets, *config.test_datasets) if built_in(entry.type) is None]
    rewards = [name for name in config.trl.reward_funcs or [] if "." in name and "/" not in name]
    interactive: list[str] = []
    for found in filter(None, (getattr(config.trl, key) for key in INTERACTIVE)):
        interactive += [found] if isinstance(found, str) else found.values() if isinstance(found, dict) else found
    return list(dict.fromkeys([*transforms, *rewards, *interactive, *config.plugins]))


def check_types(config: RunConfig) -> None:
    """Check that each transform exists and gives the rows that this run needs; only custom transforms are imported."""
    for entry in (*config.datasets, *config.test_datasets):
        check_transform(entry.type, config.required_rows)


def _overwritten(config: RunConfig) -> Iterator[str]:
    """What the run would replace or move of the files that training starts from."""
    with doing(f"looking for output_dir: {shortened(config.output_dir, 200)!r}"):
        output = os.path.realpath(config.output_dir)
    for section in ("datasets", "test_datasets"):
        for number, entry in enumerate(getattr(config, section)):
            data = os.path.realpath(entry.path)
            way = Path(os.path.relpath(output, data)).parts  # hidden folders are not read
            is_read = os.path.isdir(data) and not any(part.startswith(".") for part in way)
            if entry.data_files is None and is_read:
                yield (
                    f"output_dir: {config.output_dir} is in {section}.{number}.path: {entry.path}, whose files are all "
                    "read as data. Set output_dir to another folder, or name the files in data_files."
                )
    for key in ("base_model", "base_model_config", "tokenizer_config", "lora_model_dir"):
        name = getattr(config, key)
        if name is None:
            continue
        with doing(f"looking for {key}: {shortened(name)}"):
            source = os.path.realpath(lasting_name(name))
        if output in (source, os.path.realpath(os.path.expanduser(name))):
            yield f"output_dir: {config.output_dir} is the folder of {key}, whose files a run replaces. Set another."
        if source.startswith(os.path.join(output, "checkpoint-")):
            yield f"output_dir: {config.output_dir} has {key}: {name}, which a new run moves away. Set another."


# Keys that may differ between machines: places of files, resources, and what only the main process reads.
_OF_MACHINES = frozenset(
    (
        *("output_dir", "base_model", "base_model_config", "tokenizer_config", "lora_model_dir"),
        *("resume_from_checkpoint", "auto_resume_from_checkpoints", "dataset_prepared_path", "skip_prepare_dataset"),
        *("dataset_num_proc", "dataloader_num_workers", "dataloader_pin_memory", "local_rank", "debug", "strict"),
        *("use_tensorboard", "use_wandb", "use_trackio", "trackio_project_name", "wandb_project", "wandb_entity"),
        *("wandb_name", "wandb_run_id", "wandb_watch", "wandb_log_model", "wandb_mode", "report_to"),
        *("hub_model_id", "hub_strategy", "hub_private_repo", "trl.vllm_server_host", "trl.vllm_server_port"),
    )
)
_OF_ENTRIES = {"path", "data_files"}  # the same, of each of `datasets` and `test_datasets`
_ROWS = 8  # compared rows


def check_same_everywhere(config: RunConfig, precision: str, rows: Any, held_out: Any, checkpoint: str | None) -> None:
    """Raise ConfigError, in all processes, which call this together, if one has another config, rows or checkpoint."""
    from accelerate.utils import gather_object

    def summary(rows: Any) -> list[Any]:
        return [len(rows), *(rows[n] for n in range(min(_ROWS, len(rows))))] if isinstance(rows, Sized) else []

    # Keys of the server are for one process.
    found = {key: value for key, value in flat_settings(config) if key not in _OF_MACHINES and key[:4] != "vllm"}
    for section in ("datasets", "test_datasets"):
        found[section] = [entry.model_dump(exclude=_OF_ENTRIES) for entry in getattr(config, section)]
    found |= {
        "the precision in effect": precision,
        "the training rows": summary(rows),
        "the held-out rows": summary(held_out),
        "the checkpoint to resume from": None if checkpoint is None else Path(checkpoint).name,
    }
    first, *others = gather_object([{key: json_hash(value) for key, value in found.items()}])
    for rank, other in enumerate(others, start=1):
        names = [name for name in first.keys() | other.keys() if first.get(name) != other.get(name)]
        if names:
            raise ConfigError(
                f"The processes of this run would train different models: rank {rank} differs from rank 0 in "
                f"{', '.join(sorted(names))}. Start all with the same config, overrides and files."
            )


def check_adapted_experts(config: RunConfig, model: nn.Module) -> None:
    """Raise ConfigError if the adapter changes fused experts that the config does not name, with other settings."""
    from peft.tuners.lora.layer import ParamWrapper

    if config.lora_target_parameters is None and any(isinstance(module, ParamWrapper) for module in model.modules()):
        key = "lora_model_dir" if config.lora_model_dir is not None else "lora_target_modules"
        refuse(expert_problems(config, f"{key}, which adapts the fused experts of this model,"))


# Optimizers, without optim_args, and schedules, without lr_scheduler_kwargs, that need no check. For all others,
# transformers (and torch) is imported, and they are created for one weight.
_PLAIN = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
_PLAIN_SCHEDULES = (
    *("linear", "cosine", "cosine_with_restarts", "constant", "constant_with_warmup", "inverse_sqrt"),
    *("reduce_lr_on_plateau", "greedy"),
)
_IN_BACKWARD = "it updates weights in the backward pass: gradients are neither accumulated, clipped nor checked"
_REFUSED = {  # by the start of their names
    **dict.fromkeys(("lomo", "adalomo"), _IN_BACKWARD),
    "grokadamw": "its state is not part of checkpoints, from which runs could not be resumed",
    **dict.fromkeys(("galore", "apollo"), "its projections cannot be read from checkpoints, to resume a run"),
}


def check_optimizer(config: RunConfig) -> None:
    """Raise ConfigError for what would not train as configured; transformers raises for unknown names and arguments."""
    name = config.optimizer
    reason = next((reason for start, reason in _REFUSED.items() if name.startswith(start)), None)
    if name.endswith("layerwise"):
        reason = _IN_BACKWARD
    if reason is not None:
        raise ConfigError(f"optimizer: {name} is not supported: {reason}. Use adamw_torch_8bit to save memory.")
    if name == "muon" and (config.deepspeed is not None or config.optim_args):
        key = "optim_args" if config.optim_args else "deepspeed"
        raise ConfigError(f"{key} cannot be used with optimizer: muon. Remove it, or set adamw_torch.")
    if name not in (*_PLAIN, "muon") or config.optim_args:
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
        says = f"optim_args.{name}: transformers does not read {value} for optimizer: {config.optimizer}"
        if is_text or (value is False and settings.get(name)):
            raise ConfigError(f"{says}. Remove it.")
        if not is_read:
            warn(f"{says}. It has no effect; adam_epsilon, adam_beta1, adam_beta2 and weight_decay are keys.")


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
