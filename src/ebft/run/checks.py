"""Checks that a valid config can be trained, with this version and on this machine."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ebft.config.rules import INTERACTIVE
from ebft.config.schema import RunConfig
from ebft.data.locate import lasting_name
from ebft.data.transform_names import built_in, check_transform
from ebft.errors import ConfigError, shortened
from ebft.run.optimizer import check_optimizer
from ebft.run.trackers import check_report_to


@dataclass(frozen=True)
class Machine:
    """Accelerator support, number of processes, and names of the available devices."""

    has_accelerator: bool
    supports_bf16: bool
    processes: int = 1
    devices: tuple[str, ...] = ("cpu",)


def check_machine(config: RunConfig, machine: Machine) -> None:
    """Raise ConfigError, with an alternative, for settings that this machine does not support."""
    if config.fsdp and not machine.has_accelerator:
        raise ConfigError("fsdp requires GPUs, but none is available. Remove fsdp: several processes on a CPU use DDP.")
    if config.fsdp and machine.processes == 1:
        raise ConfigError(
            "fsdp shards the model over several processes, but only one runs. Launch several, for example torchrun "
            "--nproc-per-node 2 -m ebft.cli train CONFIG, or remove fsdp."
        )
    if config.fp16 and not machine.has_accelerator:
        raise ConfigError("fp16: true requires a GPU, but none is available. Remove it, or set bf16: true.")
    for problem in config.method.problems_here(config, machine):
        raise ConfigError(problem)


def check_runnable(config: RunConfig) -> None:
    """Raise ConfigError or DataError, with an alternative, for a valid config that cannot be trained."""
    if config.sample_packing and config.group_by_length:
        raise ConfigError(
            "group_by_length groups rows by length, but sample_packing fills all rows up to sequence_len. Remove one."
        )
    problems = list(config.method.problems(config))
    if problems:
        raise ConfigError("\n".join(problems))
    check_types(config)
    _check_processes(config)
    _check_output_dir(Path(config.output_dir))
    _check_not_overwritten(config)
    _check_deepspeed(config.deepspeed)
    check_report_to(config)
    check_optimizer(config)
    if config.plugins:
        from ebft.run.plugins import check_plugins  # imports transformers

        check_plugins(config.plugins)


def imported_names(config: RunConfig) -> list[str]:
    """The functions and classes of the user, as module.name, whose modules `check_runnable` imports."""
    transforms = [entry.type for entry in (*config.datasets, *config.test_datasets) if built_in(entry.type) is None]
    rewards = [name for name in config.trl.reward_funcs or [] if "." in name and "/" not in name]
    return list(dict.fromkeys([*transforms, *rewards, *_interactive(config), *config.plugins]))


def _interactive(config: RunConfig) -> Iterator[str]:
    for key in INTERACTIVE:
        found = getattr(config.trl, key) or []
        yield from [found] if isinstance(found, str) else found.values() if isinstance(found, dict) else found


def check_types(config: RunConfig) -> None:
    """Check that each transform exists and gives the rows that this run needs; only custom transforms are imported."""
    for entry in (*config.datasets, *config.test_datasets):
        check_transform(entry.type, config.required_rows)


def _check_processes(config: RunConfig) -> None:
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if config.ddp is False and processes > 1:
        raise ConfigError(f"ddp: false, but {processes} processes were launched. Launch one, or remove ddp.")
    if config.ddp and processes == 1:
        raise ConfigError(
            "ddp: true, but only one process runs. Launch several, for example torchrun --nproc-per-node 2 "
            "-m ebft.cli train CONFIG, or remove ddp."
        )


def _check_output_dir(folder: Path) -> None:
    """Check that the folder can be created, which happens when training starts."""
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:  # for example a name that is too long
        name = shortened(folder, 200)
        raise ConfigError(f"output_dir: cannot create {name} ({error.strerror}). Choose another folder.") from error
    if not existing.is_dir():
        raise ConfigError(f"output_dir: cannot create {folder} because {existing} is a file. Choose another folder.")
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"output_dir: cannot write to {folder} ({existing} is read-only). Choose another folder.")


def _check_not_overwritten(config: RunConfig) -> None:
    """Check that the trained model does not replace the files that training starts from."""
    output = os.path.realpath(config.output_dir)
    for key in ("base_model", "base_model_config", "tokenizer_config", "lora_model_dir"):
        name = getattr(config, key)
        if name is not None and os.path.realpath(lasting_name(name)) == output:
            raise ConfigError(
                f"output_dir: {config.output_dir} is the folder of {key}, whose files the trained model would replace. "
                "Choose another folder."
            )


def _check_deepspeed(deepspeed: str | dict | None) -> None:
    if deepspeed is None:
        return
    if find_spec("deepspeed") is None:
        raise ConfigError("deepspeed requires the package deepspeed: pip install deepspeed. Or remove it to use DDP.")
    if isinstance(deepspeed, dict):
        return
    try:
        json.loads(Path(deepspeed).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"deepspeed: {deepspeed} cannot be read as JSON ({error}). Give the path to a JSON file."
        ) from error
