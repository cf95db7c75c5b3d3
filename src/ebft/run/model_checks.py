"""Checks of a run that need its rows or its model: all processes train the same, and modules can be sharded."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from ebft.config.checks.combinations import expert_problems
from ebft.config.schema import RunConfig
from ebft.errors import ConfigError
from ebft.models.keys import FSDPKeys

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
_OF_ENTRIES = ("path", "data_files")  # the same, of each of `datasets` and `test_datasets`
_ROWS = 8  # compared rows


def check_same_everywhere(config: RunConfig, precision: str, rows: Any, held_out: Any, checkpoint: str | None) -> None:
    """Raise ConfigError, in all processes, if one of them has another config, other rows, or resumes elsewhere.

    `precision` is the one in effect, `held_out` the evaluation rows or None. All processes must call this together.
    """
    settings = config.model_dump(mode="json")
    for entry in (*settings["datasets"], *settings["test_datasets"]):
        for key in _OF_ENTRIES:
            del entry[key]
    found = {key: value for key, value in _flat(settings) if key not in _OF_MACHINES} | {
        "the precision in effect": precision,
        "the training rows": _summary(rows),
        "the held-out rows": _summary(held_out),
        "the checkpoint to resume from": None if checkpoint is None else Path(checkpoint).name,
    }
    check_equal(gather_object([{key: _digest(value) for key, value in found.items()}]))


def check_equal(digests: list[dict[str, str]]) -> None:
    """Raise ConfigError if the digests of a process, which are in the order of ranks, are not those of the first."""
    first = digests[0]
    for rank, other in enumerate(digests):
        names = [name for name in first.keys() | other.keys() if first.get(name) != other.get(name)]
        if names:
            raise ConfigError(
                f"The processes of this run would train different models: rank {rank} differs from rank 0 in "
                f"{', '.join(sorted(names))}. Start all processes, on every machine, with the same config, overrides "
                "and files."
            )


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values of keys and of the keys of sections, such as `ebft.stride`; those of the server are for one process."""
    for key, value in values.items():
        if isinstance(value, dict) and key != "vllm":
            yield from _flat(value, f"{prefix}{key}.")
        elif key != "vllm":
            yield prefix + key, value


def _summary(rows: Any) -> list[Any]:
    """The number of the rows, and the first ones."""
    if not isinstance(rows, Sized):
        return []
    return [len(rows), *(rows[place] for place in range(min(_ROWS, len(rows))))]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


_BY_SIZE, _BY_CLASS = "SIZE_BASED_WRAP", "TRANSFORMER_BASED_WRAP"


def check_wrapping_of(config: RunConfig, model_config: PretrainedConfig) -> None:
    """`check_wrapping` for the model that a transformers configuration describes, before its weights are loaded."""
    if not config.fsdp or config.fsdp_config is None:
        return
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=config.trust_remote_code)
    except (ValueError, ImportError):  # reported when it is loaded
        return
    check_wrapping(config, model)


def check_wrapping(config: RunConfig, model: nn.Module) -> None:
    """Raise ConfigError if `fsdp_config` selects modules that the model does not have or that cannot be sharded."""
    if not config.fsdp:
        return
    details = config.fsdp_config or FSDPKeys()
    if details.auto_wrap_policy == _BY_SIZE:
        _check_sizes(details.min_num_params, model)
    given = details.transformer_layer_cls_to_wrap
    if given is not None and details.auto_wrap_policy == _BY_CLASS:
        _check_classes([given] if isinstance(given, str) else given, model)


def check_adapted_experts(config: RunConfig, model: nn.Module) -> None:
    """Raise ConfigError if the adapter changes fused experts that the config does not name, with other settings."""
    if config.lora_target_parameters is None and any(isinstance(module, ParamWrapper) for module in model.modules()):
        key = "lora_model_dir" if config.lora_model_dir is not None else "lora_target_modules"
        key = "lora_target_linear: true" if config.lora_target_linear else key
        for problem in expert_problems(config, f"{key}, which adapts the fused experts of this model,"):
            raise ConfigError(problem)


def _check_classes(wanted: list[str], model: nn.Module) -> None:
    names = sorted({type(module).__name__ for module in model.modules()})
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            raise ConfigError(
                f"fsdp_config.transformer_layer_cls_to_wrap: the model has no module of the class {name!r:.60}."
                f"{f' Did you mean {near[0]}?' if near else ''} Without the key, the classes are those that the model "
                "declares."
            )


def _check_sizes(smallest: int, model: nn.Module) -> None:
    """The policy selects modules by size only, also lists of layers, which have no forward pass to gather them for."""
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
