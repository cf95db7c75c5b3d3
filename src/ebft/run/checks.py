"""Checks that a valid config can be trained, in three stages.

1. On the config, the files that it names and the installed packages, without torch: `check_runnable`.
2. On the machine: `check_machine`.
3. On the rows and the model: `check_same_everywhere`, `check_wrapping` and `check_adapted_experts`. Checks of rows by a
   method, and of memory and disk space, are in training.py and rehearsal.py.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Iterator, Sized
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebft.catalog import is_gguf, lasting_name
from ebft.config.rules import INTERACTIVE
from ebft.config.section import flat_settings
from ebft.data.transforms import built_in, check_transform
from ebft.errors import ConfigError, MissingPackageError, ModelError, doing, shortened
from ebft.files import json_hash
from ebft.machine import Machine
from ebft.methods.processes import check_deepspeed, offloads
from ebft.processes import LAUNCHER
from ebft.run.config.combinations import expert_problems
from ebft.run.config.schema import RunConfig
from ebft.run.optimizer import check_optimizer
from ebft.run.output import check_own
from ebft.run.reporting import check_trackers

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

_UNSET = f"Start training with ebft train or a launcher such as torchrun, or unset {', '.join(LAUNCHER)}."


def check_machine(config: RunConfig, machine: Machine) -> None:
    """Raise ConfigError, with an alternative, for settings that this machine does not support."""
    if config.fsdp and not machine.has_accelerator and offloads(config):
        raise ConfigError("fsdp: parameters cannot be offloaded to the CPU in a run on CPU. Remove cpu_offload.")
    if config.deepspeed is not None and not machine.has_accelerator:
        raise ConfigError(
            "deepspeed requires GPUs: on CPU, accelerate lets each process train on all rows. Remove deepspeed to use "
            "DDP, or set fsdp: true, which also runs on CPU."
        )
    if config.fsdp and machine.processes == 1:
        raise ConfigError(
            "fsdp shards the model over several processes, but only one runs. Start several, for example ebft train "
            "CONFIG --num-processes 2, or remove fsdp."
        )
    if config.fsdp and not machine.has_accelerator:
        warnings.warn("fsdp on CPU is slow, and only useful for tests: DDP is faster if the model fits.", stacklevel=2)
    if config.fp16 and not machine.has_accelerator:
        raise ConfigError("fp16: true requires a GPU, but none is available. Remove it, or set bf16: true.")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if config.dataloader_num_workers > cores:
        warnings.warn(
            f"dataloader_num_workers: {config.dataloader_num_workers} is more than the {cores} CPU cores of this "
            "machine, so the processes that load batches slow down each other and training.",
            stacklevel=2,
        )
    if config.tf32 and not machine.supports_tf32:
        warnings.warn(
            "tf32: true has no effect: it requires an Ampere or newer GPU, which this machine does not have.",
            stacklevel=2,
        )
    if config.activation_offloading and not machine.has_accelerator:
        warnings.warn("activation_offloading: true has no effect on CPU: activations are in main memory.", stacklevel=2)
    for problem in config.method.problems_here(config, machine):
        raise ConfigError(problem)
    missing = list(_missing_on_gpus(config)) if machine.has_accelerator else []
    if missing:
        raise MissingPackageError("\n".join(missing))


def check_runnable(config: RunConfig, processes: int | None = None, *, elsewhere: bool = False) -> None:
    """Raise ConfigError or DataError, with an alternative, for a valid config that cannot be trained.

    `processes`: the number of processes that will train; None: that of the launch to which this process belongs.
    `elsewhere`: training may run on another machine, so packages that are missing here are warnings, and the number of
    processes is not checked.
    """
    if config.sample_packing and config.group_by_length:
        raise ConfigError(
            "group_by_length groups rows by length, but sample_packing fills all rows up to sequence_len. Remove one."
        )
    problems = list(config.method.problems(config))
    if problems:
        raise ConfigError("\n".join(problems))
    if config.evaluation.pass_at:
        config.evaluation.counts(config.method.sampling(config).samples)  # raises
    check_types(config)
    if not elsewhere:
        _check_processes(config, launched_processes() if processes is None else processes)
    _check_output_dir(Path(config.output_dir))
    _check_not_overwritten(config)
    check_own(config)
    missing = list(config.method.missing_packages(config))
    if elsewhere and config.use_ray and find_spec("ray") is None:  # which train needs before it gets here
        missing.append("use_ray requires the package ray: pip install 'ebft[ray]'")
    for check in (check_deepspeed, check_optimizer, check_trackers):
        try:
            check(config)
        except MissingPackageError as error:
            missing += str(error).split("\n")
    if config.plugins:
        from ebft.run.plugins import check_plugins  # imports transformers

        check_plugins(config.plugins)
    if missing and not elsewhere:
        raise MissingPackageError("\n".join(missing))
    for message in missing:
        warnings.warn(f"Needed for training: {message}", stacklevel=2)
    for message in _missing_on_gpus(config) if elsewhere else ():
        warnings.warn(f"Needed for training on a GPU: {message}", stacklevel=2)


def _missing_on_gpus(config: RunConfig) -> Iterator[str]:
    """Packages that are not installed and that a run needs on GPUs only, one message each."""
    for key in ("load_in_4bit", "load_in_8bit"):
        if getattr(config, key) and find_spec("bitsandbytes") is None:
            yield f"{key} requires the package bitsandbytes: pip install 'ebft[qlora]'. Or remove it."
    yield from config.method.missing_on_gpus(config)


def launched_processes() -> int:
    """The number of processes of the launch to which this process belongs; 1 without a launcher.

    Raises ConfigError if the environment variables of launchers are incomplete or no numbers.
    """
    found = {name: os.environ[name] for name in LAUNCHER if name in os.environ}
    for name, value in found.items():
        if name != "MASTER_ADDR" and (not value.isdecimal() or (name == "WORLD_SIZE" and int(value) == 0)):
            raise ConfigError(f"The environment variable {name} is {value!r:.60}; expected a number. {_UNSET}")
    processes = int(found.get("WORLD_SIZE", 1))
    missing = [name for name in LAUNCHER if name not in found]
    if missing and ("LOCAL_RANK" in found or processes > 1):
        given = "LOCAL_RANK" if "LOCAL_RANK" in found else "WORLD_SIZE"
        raise ConfigError(
            f"The environment variable {given} is set, as launchers do, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not. {_UNSET}"
        )
    return processes


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


def _check_processes(config: RunConfig, processes: int) -> None:
    if config.dp_shard_size not in (None, 1, processes):
        raise ConfigError(
            f"dp_shard_size: {config.dp_shard_size}, but the model is sharded over all {processes} processes. "
            "Remove it."
        )
    if config.ddp is False and processes > 1:
        raise ConfigError(f"ddp: false, but {processes} processes were launched. Launch one, or remove ddp.")
    if config.ddp and processes == 1:
        raise ConfigError(
            "ddp: true, but only one process runs. Start several, for example ebft train CONFIG --num-processes 2, or "
            "remove ddp."
        )


def _check_output_dir(folder: Path) -> None:
    """Check that the folder can be created, which happens when training starts."""
    if "\0" in str(folder):
        name = shortened(repr(str(folder)), 200)
        raise ConfigError(f"output_dir: cannot create {name}, which contains a NUL character. Choose another folder.")
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:  # for example a name that is too long
        name = shortened(folder, 200)
        raise ConfigError(f"output_dir: cannot create {name} ({error.strerror}). Choose another folder.") from error
    if not existing.is_dir():
        raise ConfigError(f"output_dir: cannot create {folder} because {existing} is a file. Choose another folder.")
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"output_dir: cannot write to {folder} ({existing} is read-only). Choose another folder.")


def _is_read(folder: Path, data: Path) -> bool:
    """Whether the files of `folder` are read if the folder `data` is a dataset, which hidden ones are not."""
    return (
        os.path.isdir(data)  # unlike Path.is_dir, False for names that the system does not accept
        and folder.is_relative_to(data)
        and not any(part.startswith(".") for part in folder.relative_to(data).parts)
    )


def _check_not_overwritten(config: RunConfig) -> None:
    """Check that the run neither replaces nor moves the files that training starts from."""
    output = os.path.realpath(config.output_dir)
    for section in ("datasets", "test_datasets"):
        for number, entry in enumerate(getattr(config, section)):
            if entry.data_files is None and _is_read(Path(output), Path(os.path.realpath(entry.path))):
                raise ConfigError(
                    f"output_dir: {config.output_dir} is in the folder of {section}.{number}.path: {entry.path}, all "
                    "files of which are read as data, so that this or a later run would read the files of this run. "
                    "Set output_dir to another folder, or name the files in data_files."
                )
    for key in ("base_model", "base_model_config", "tokenizer_config", "lora_model_dir"):
        name = getattr(config, key)
        if name is None:
            continue
        with doing(f"looking for {key}: {shortened(name)}"):
            source = os.path.realpath(lasting_name(name))
        if source == output:
            raise ConfigError(
                f"output_dir: {config.output_dir} is the folder of {key}, whose files the trained model would replace. "
                "Choose another folder."
            )
        if os.path.realpath(os.path.expanduser(name)) == output:
            raise ConfigError(
                f"output_dir: {config.output_dir} is also the name of {key}, which would then be this folder. Choose "
                "another folder."
            )
        if source.startswith(os.path.join(output, "checkpoint-")):
            raise ConfigError(
                f"output_dir: {config.output_dir} contains {key}: {name}, a checkpoint of an earlier run, which a new "
                "run in the same folder moves away. Choose another folder."
            )


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
    """Raise ConfigError, in all processes, if one of them has another config, other rows, or resumes elsewhere.

    `precision` is the one in effect, `held_out` the evaluation rows or None. All processes must call this together.
    """
    from accelerate.utils import gather_object

    # Those of the server are for one process.
    found = {key: value for key, value in flat_settings(config) if key not in _OF_MACHINES and key[:4] != "vllm"}
    for section in ("datasets", "test_datasets"):
        found[section] = [entry.model_dump(exclude=_OF_ENTRIES) for entry in getattr(config, section)]
    found |= {
        "the precision in effect": precision,
        "the training rows": _summary(rows),
        "the held-out rows": _summary(held_out),
        "the checkpoint to resume from": None if checkpoint is None else Path(checkpoint).name,
    }
    check_equal(gather_object([{key: json_hash(value) for key, value in found.items()}]))


def check_equal(hashes: list[dict[str, str]]) -> None:
    """Raise ConfigError if the hashes of a process, which are in the order of ranks, are not those of the first."""
    first = hashes[0]
    for rank, other in enumerate(hashes):
        names = [name for name in first.keys() | other.keys() if first.get(name) != other.get(name)]
        if names:
            raise ConfigError(
                f"The processes of this run would train different models: rank {rank} differs from rank 0 in "
                f"{', '.join(sorted(names))}. Start all processes, on every machine, with the same config, overrides "
                "and files."
            )


def _summary(rows: Any) -> list[Any]:
    """The number of the rows, and the first ones."""
    if not isinstance(rows, Sized):
        return []
    return [len(rows), *(rows[place] for place in range(min(_ROWS, len(rows))))]


_BY_SIZE, _BY_CLASS = "SIZE_BASED_WRAP", "TRANSFORMER_BASED_WRAP"


def check_served(config: RunConfig) -> None:
    """Raise ConfigError if vLLM would serve a multimodal checkpoint of which the text model is trained alone."""
    if config.method.rows != "prompts" or not config.trl.use_vllm or config.gguf_file is not None:
        return
    from transformers import PreTrainedConfig

    from ebft.models.load import find_base_model, load_model_config

    try:
        name = find_base_model(config)
        if is_gguf(name):  # refused for vLLM
            return
        whole = PreTrainedConfig.get_config_dict(name, revision=config.revision_of_model)[0].get("model_type")
        text = load_model_config(config).model_type
    except (OSError, ModelError):  # reported when it is loaded
        return
    if text != whole:
        save = "pretrained_model(IN).save_pretrained(OUT); pretrained_tokenizer(IN).save_pretrained(OUT)"
        raise ConfigError(
            f"trl.use_vllm: vLLM would serve all of {config.base_model} ({whole}), but its text model ({text}) is "
            "trained alone, whose weights and adapters have other names, so vLLM would not sample from the trained "
            "model. Save the text model in a folder, with its names IN and OUT in `from ebft.models.pretrained import "
            f"pretrained_model, pretrained_tokenizer; {save}`, and set base_model to it; or set trl.use_vllm: false."
        )


def check_wrapping_of(config: RunConfig, model_config: PretrainedConfig) -> None:
    """`check_wrapping` for the model that a transformers configuration describes, before its weights are loaded."""
    if not config.fsdp or config.fsdp_config is None:
        return
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=config.trust_remote_code)
    except (ValueError, ImportError):  # reported when it is loaded
        return
    check_wrapping(config, model)


def check_wrapping(config: RunConfig, model: nn.Module) -> None:
    """Raise ConfigError if `fsdp_config` selects modules that the model does not have or that cannot be sharded."""
    details = config.fsdp_config
    if not config.fsdp or details is None:
        return
    if details.auto_wrap_policy == _BY_SIZE:
        _check_sizes(details.min_num_params, model)
    given = details.transformer_layer_cls_to_wrap
    if given is None or details.auto_wrap_policy != _BY_CLASS:
        return
    names = sorted({type(module).__name__ for module in model.modules()})
    for name in [given] if isinstance(given, str) else given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            raise ConfigError(
                f"fsdp_config.transformer_layer_cls_to_wrap: the model has no module of the class {name!r:.60}."
                f"{f' Did you mean {near[0]}?' if near else ''} Without the key, the classes are those that the model "
                "declares."
            )


def _check_sizes(smallest: int, model: nn.Module) -> None:
    """The policy selects modules by size only, also lists of layers, which have no forward pass to gather them for."""
    from torch import nn

    sizes = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward
    }
    name, size = max(sizes.items(), key=lambda item: item[1], default=("", 0))
    if size > smallest:
        raise ConfigError(
            f"fsdp_config.auto_wrap_policy: {_BY_SIZE} with min_num_params: {smallest} also selects {name}, a list of "
            f"modules with {size:,} parameters, which FSDP2 cannot shard. Remove auto_wrap_policy to shard "
            f"each decoder layer, or set min_num_params to at least {size}."
        )


def check_adapted_experts(config: RunConfig, model: nn.Module) -> None:
    """Raise ConfigError if the adapter changes fused experts that the config does not name, with other settings."""
    from peft.tuners.lora.layer import ParamWrapper

    if config.lora_target_parameters is None and any(isinstance(module, ParamWrapper) for module in model.modules()):
        key = "lora_model_dir" if config.lora_model_dir is not None else "lora_target_modules"
        for problem in expert_problems(config, f"{key}, which adapts the fused experts of this model,"):
            raise ConfigError(problem)
