"""Models whose parameters FSDP2 shards over the processes.

A module's parameters are whole only while it runs as part of a forward pass of the outermost module, in which all
processes take part equally often.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule

from ebft.errors import ConfigError


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 has sharded the model."""
    return isinstance(model, FSDPModule)


def check_version(accelerator: Any, reference: nn.Module | None, compares_weights: bool) -> None:
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
    if plugin.cpu_ram_efficient_loading and (reference is not None or compares_weights):
        what = "a vLLM server" if compares_weights else "beta > 0 without an adapter"
        raise ConfigError(
            f"{what} is incompatible with cpu_ram_efficient_loading, with which only the first process has the weights "
            "before training. Set cpu_ram_efficient_loading: false in fsdp_config."
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
