"""Whether the loaded model suits `fsdp_config`, and its adapter the other keys."""

from __future__ import annotations

import difflib

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from ebft.config.adapter_checks import expert_problems
from ebft.config.schema import RunConfig
from ebft.errors import ConfigError
from ebft.models.keys import FSDPKeys

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
