"""Models whose parameters FSDP2 or DeepSpeed ZeRO-3 shards over the processes.

A module's parameters are whole only while it runs as part of a forward pass of the outermost module, in which all
processes take part equally often.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import utils
from accelerate.state import PartialState
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint import CheckpointException, load
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.fsdp import FSDPModule, StateDictType
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from ebft.errors import ConfigError, ModelError
from ebft.models.weight_files import OPTIMIZER, WEIGHTS, ShardedReader, WeightFiles
from ebft.transformers_internals import convert_weights, unset_hf_deepspeed_config, weight_groups


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 or ZeRO-3 has sharded the model."""
    return isinstance(model, FSDPModule) or is_partitioned(model)


def is_partitioned(model: nn.Module) -> bool:
    """Whether ZeRO-3 has sharded the model, all of whose parameters it marks."""
    return hasattr(next(model.parameters(), None), "ds_id")


def load_whole() -> None:
    """Make `from_pretrained` load whole weights with ZeRO-3, which then partitions them when training starts. Otherwise
    it partitions them while they are loaded, before the model can be copied and its passes checked."""
    unset_hf_deepspeed_config()


def check_whole(model: nn.Module) -> None:
    """Raise ModelError for a model that ZeRO-3 has partitioned already."""
    if is_partitioned(model):
        raise ModelError("ZeRO-3 loaded the model in parts. Load it before the training arguments, or give its name.")


def keep_head(causal_lm: PreTrainedModel) -> None:
    """Make ZeRO-3 gather the output layer for each forward pass of the model; no effect on other models. Processes
    apply it to different numbers of chunks, also in backward, which must not communicate."""
    if is_partitioned(causal_lm):
        import deepspeed

        for parameter in causal_lm.get_output_embeddings().parameters():
            deepspeed.zero.register_external_parameter(causal_lm, parameter)


def saves_parts(accelerator: Any) -> bool:
    """Whether every process saves its own part of checkpoints."""
    plugin = _plugin(accelerator)
    return plugin is not None and plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT


def set_up(accelerator: Any, settings: dict[str, Any]) -> bool:
    """Make an accelerator shard models over processes, also on CPU, where accelerate ignores its plugin for FSDP.

    Returns whether it does. From here on, `load_complete` keeps weights on every process: only the policy gets them
    later.
    """
    if settings.get("activation_checkpointing"):
        raise ConfigError("fsdp_config.activation_checkpointing is not supported. Set gradient_checkpointing.")
    plugin, state = utils.FullyShardedDataParallelPlugin(**settings), accelerator.state
    if state.distributed_type == utils.DistributedType.MULTI_CPU:
        if accelerator.mixed_precision != "no":
            plugin.set_mixed_precision(accelerator.mixed_precision)
        state.fsdp_plugin = plugin
        state.distributed_type = PartialState().distributed_type = utils.DistributedType.FSDP
    utils.disable_fsdp_ram_efficient_loading()
    return _plugin(accelerator) is not None


def load_on_first_process(args: Any) -> None:
    """Make `load_complete` keep weights on the first process of each machine only, if the arguments ask for it. The
    others have zeros until the model is sharded, when they receive their parts."""
    if args.fsdp and (args.fsdp_plugin_args or {}).get("cpu_ram_efficient_loading"):
        utils.enable_fsdp_ram_efficient_loading()


def check_version(accelerator: Any, compares_weights: bool = False) -> None:
    """Raise ConfigError for FSDP1, and if weights that only the first process has loaded are used before training.
    `compares_weights`: whether they are compared with the weights of a server."""
    plugin = _plugin(accelerator)
    if plugin is None:
        return
    if plugin.fsdp_version != 2:
        raise ConfigError("FSDP1 is not supported. Remove version from fsdp_config, or set it to 2.")
    if plugin.cpu_ram_efficient_loading and compares_weights:
        raise ConfigError("a vLLM server is incompatible with cpu_ram_efficient_loading. Set it to false.")


def keep_output_dtype(accelerator: Any) -> None:
    """Keep FSDP2 from rounding log-probabilities, which are computed in float32, to the dtype of mixed precision. Must
    be called before the model is sharded. Layers are not affected, because they compute in this dtype already."""
    plugin = _plugin(accelerator)
    if plugin is not None and plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, output_dtype=None)


def keep_whole_eight_bits(accelerator: Any, model: nn.Module) -> None:
    """Keep FSDP2 from sharding linear layers in 8 bits, whose scales are attributes of the weights; PyTorch would not
    find these by their names in the state dict."""
    if _plugin(accelerator) is None:
        return
    is_in_eight = lambda module: any(type(own).__name__ == "Int8Params" for own in module.parameters(recurse=False))
    in_eight = [*filter(is_in_eight, model.modules())]
    _plugin(accelerator).ignored_modules = in_eight or None

    def forget_scales(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in ("SCB", "weight_format"):
            state.pop(prefix + name, None)

    for module in in_eight:
        module.register_state_dict_post_hook(forget_scales)


def _plugin(accelerator: Any) -> Any:
    return getattr(accelerator.state, "fsdp_plugin", None)  # accelerate sets it with FSDP only


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, so that `model.parameters()` are those that the optimizer updates."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_trained_weights(model: nn.Module) -> dict[str, Tensor] | None:
    """Gather the trained parameters, by name, on the first process; {} on others. None if the model is not sharded. All
    processes must call this together."""
    if not is_sharded(model):
        return None
    options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    return dcp.get_model_state_dict(model, options=options)


WHOLE_OPTIMIZER = "optimizer.pt"
_SAME = "Resume with the base model, tokens and adapter of the run that saved it, or start a new run."
_MODEL, _ADAPTER = "model*.safetensors", "adapter_model*.safetensors"


def is_in_parts(folder: Path) -> bool:
    """Whether the weights of a checkpoint are in parts."""
    return (folder / WEIGHTS).is_dir()


@torch.no_grad()
def load_checkpoint_weights(model: nn.Module, folder: Path) -> None:
    """Load the weights of a checkpoint, or its adapters, into the model. transformers ignores weights that one of both
    lacks, and names in files that differ from the model's. Raises ModelError if weights are missing or do not fit."""
    reshard(model)
    if is_in_parts(folder):
        load_parts({"model": _weights_of(model)}, folder / WEIGHTS)
        return
    if not isinstance(model, PeftModel):
        with _files(folder, _MODEL) as files:
            groups = weight_groups(model, files.weights)
            for key in [group.keys[0] for group in groups if not group.names][:1]:
                raise ModelError(f"{folder} has the weight {key}, which the model has not. {_SAME}")
            read = lambda group: convert_weights(model, group, {key: files.read(key) for key in group.keys}).items()
            _copy((pair for group in groups for pair in read(group)), model, model.state_dict(), folder)
        return
    for name in model.peft_config:
        inside = folder / name
        place = inside if any(inside.glob(_ADAPTER)) else folder
        if place == inside or name == "default":  # as PEFT saves them
            with _files(place, _ADAPTER) as files:
                _copy(((key, files.read(key)) for key in files.weights), model, _weights_of(model, name), place)


def save_whole_optimizer(optimizer: Optimizer, folder: Path, is_writer: bool) -> None:
    """Write the gathered state of an optimizer as a run without FSDP does; `is_writer` on one process."""

    def gathered(value: Any) -> Any:
        if isinstance(value, DTensor):  # with cpu_offload, not where processes communicate
            value = value.to(value.device_mesh.device_type)
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return (whole.cpu() if isinstance(whole, Tensor) else whole) if is_writer else None

    state = optimizer.state_dict()
    for index in state["state"]:
        state["state"][index] = {name: gathered(value) for name, value in state["state"][index].items()}
    if is_writer:
        torch.save(state, folder / WHOLE_OPTIMIZER)


def load_optimizer(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    reshard(model)
    if (folder / OPTIMIZER).is_dir():
        inner = optimizer.optimizer if hasattr(optimizer, "optimizer") else optimizer  # of accelerate's wrapper
        state = {"optimizer": dcp.get_optimizer_state_dict(model, inner)}
        load_parts(state, folder / OPTIMIZER)
        dcp.set_optimizer_state_dict(model, inner, state["optimizer"])
        return
    state = torch.load(folder / WHOLE_OPTIMIZER, map_location="cpu", weights_only=True, mmap=True)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, entries in state["state"].items():
        like = parameters[index]
        state["state"][index] = {
            name: _part(value, like) if isinstance(value, Tensor) and value.shape == like.shape else value
            for name, value in entries.items()
        }
    optimizer.load_state_dict(state)


def _weights_of(model: nn.Module, adapter: str | None = None) -> dict[str, Tensor]:
    """The tensors of the model, or of one of its adapters, by their names in checkpoints; changing them in place
    changes the model."""
    if isinstance(model, PeftModel):
        return get_peft_model_state_dict(model, adapter_name=adapter or model.active_adapter)
    return model.state_dict()


def load_parts(state: dict[str, Any], folder: Path) -> None:
    """Read the tensors of `state` from a folder of parts. Raises ModelError."""
    try:
        load(state, storage_reader=ShardedReader(folder), no_dist=not distributed.is_initialized())
    except CheckpointException as error:  # is no Exception; its message has the tracebacks of all processes
        raise ModelError(f"{folder} cannot be read: {str(error).strip().splitlines()[-1]}") from error


def _files(folder: Path, pattern: str) -> WeightFiles:
    return WeightFiles(sorted(folder.glob(pattern)))


def _copy(weights: Iterable[tuple[str, Tensor]], model: nn.Module, targets: dict[str, Tensor], folder: Path) -> None:
    """Copy weights to all of the targets; of tied weights, files have one name."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    same, missing = {name: tied for tied in names.values() for name in tied}, {*targets}
    for name, value in weights:
        own = tuple(targets[name].shape) if name in targets else None
        if own != tuple(value.shape):
            raise ModelError(f"{name} has the shape {tuple(value.shape)} in {folder}, but {own} in the model. {_SAME}")
        targets[name].copy_(_part(value, targets[name]))
        missing -= {name, *same.get(name, ())}
    if missing:
        raise ModelError(f"{folder} has no weights for {min(missing)} ({len(missing)} weights are missing). {_SAME}")


def _part(whole: Tensor, like: Tensor) -> Tensor:
    """`whole` as `like` is sharded; this process's part is cut from its own `whole`, without communication."""
    if not isinstance(like, DTensor):
        return whole
    part = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return part.to(like.device)  # the CPU with cpu_offload
