"""Models whose parameters FSDP2 shards over the processes.

A module's parameters are whole only while it runs as part of a forward pass of the outermost module, in which all
processes take part equally often.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from accelerate.state import PartialState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, StateDictType

from ebft.errors import ConfigError


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 has sharded the model."""
    return isinstance(model, FSDPModule)


def is_enabled(accelerator: Any) -> bool:
    """Whether the accelerator shards the models that it prepares."""
    return _plugin(accelerator) is not None


def saves_parts(accelerator: Any) -> bool:
    """Whether every process saves its own part of checkpoints."""
    plugin = _plugin(accelerator)
    return plugin is not None and plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT


def shard_on_cpu(accelerator: Any, plugin: FullyShardedDataParallelPlugin) -> None:
    """Make an accelerator shard models over processes on CPU, where accelerate ignores its plugin for FSDP."""
    state = accelerator.state
    if state.distributed_type != DistributedType.MULTI_CPU:
        return
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    state.fsdp_plugin = plugin
    state.distributed_type = PartialState().distributed_type = DistributedType.FSDP


def load_on_first_process(args: Any) -> None:
    """Make `from_pretrained` read weights on the first process of each machine only, if the arguments ask for it.

    The others have zeros until the model is sharded, when they receive their parts.
    """
    if args.fsdp and (args.fsdp_plugin_args or {}).get("cpu_ram_efficient_loading"):
        enable_fsdp_ram_efficient_loading()


def load_on_every_process() -> None:
    """Make `from_pretrained` read weights on every process from here on: only the policy receives them later."""
    disable_fsdp_ram_efficient_loading()


def check_version(accelerator: Any, compares_weights: bool = False) -> None:
    """Raise ConfigError for FSDP1, and if weights that only the first process has loaded are used before training.

    `compares_weights`: whether they are compared with those of a server.
    """
    plugin = _plugin(accelerator)
    if plugin is None:
        return
    if plugin.fsdp_version != 2:
        raise ConfigError(
            "FSDP1 is not supported: completions are sampled and scored in programs that run inside the forward of the "
            "outermost module, which FSDP1 does not allow. Remove version from fsdp_config, or set it to 2."
        )
    if plugin.cpu_ram_efficient_loading and compares_weights:
        raise ConfigError(
            "a vLLM server is incompatible with cpu_ram_efficient_loading, with which only the first process has the "
            "weights before training. Set cpu_ram_efficient_loading: false in fsdp_config."
        )


def keep_output_dtype(accelerator: Any) -> None:
    """Keep FSDP2 from rounding log-probabilities, which are computed in float32, to the dtype of mixed precision.

    Must be called before the model is sharded. Layers are not affected, because they compute in this dtype already.
    """
    plugin = _plugin(accelerator)
    if plugin is not None and plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, output_dtype=None)


def _plugin(accelerator: Any) -> Any:
    return getattr(accelerator.state, "fsdp_plugin", None)  # accelerate sets it with FSDP only


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, so that `model.parameters()` are those that the optimizer updates."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_trained_weights(model: nn.Module) -> dict[str, Tensor] | None:
    """Gather the trained parameters, by name, on the first process; {} on others. None if the model is not sharded.

    All processes must call this together.
    """
    if not is_sharded(model):
        return None
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    return get_model_state_dict(model, options=options)
