"""The keys of FSDP2: what contradicts them, and the arguments of transformers that they become."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebft.config.keys.models import FSDPKeys
from ebft.errors import ConfigError, MissingPackageError, doing

if TYPE_CHECKING:
    from ebft.methods.method import MethodConfig

SHARDED = "SHARDED_STATE_DICT"
_WORDS = ("full_shard", "shard_grad_op", "auto_wrap", "offload")


def fsdp_problems(config: MethodConfig) -> Iterator[str]:
    """What contradicts `fsdp` and `fsdp_config`."""
    if not (config.fsdp or config.fsdp_config):
        return
    details = config.fsdp_config or FSDPKeys()
    for key, version in (("fsdp_version", config.fsdp_version), ("fsdp_config.version", details.version)):
        if version not in (None, 2):
            yield f"{key}: {version} is not supported, only FSDP2. Set it to 2, or remove it."
    unknown = [word for word in _words(config) if word not in _WORDS]
    if unknown:
        yield f"fsdp: {unknown[0]!r} is not supported. Set fsdp: true, or choose from {', '.join(_WORDS)}."
    if details.activation_checkpointing and not config.method.runs_plain_model:
        yield (
            "fsdp_config.activation_checkpointing is only supported by SFT. Remove it, or set gradient_checkpointing: "
            "true, which recomputes the passes that share prefixes."
        )
    if details.state_dict_type == SHARDED and config.save_only_model:
        yield (
            f"save_only_model: true is incompatible with fsdp_config.state_dict_type: {SHARDED}. Remove one; "
            "the final model is saved whole with both types."
        )
    if config.save_only_model and config.load_best_model_at_end:
        yield "save_only_model and load_best_model_at_end cannot both be set with fsdp. Remove one."


def fsdp_arguments(config: MethodConfig) -> dict[str, Any]:
    """The arguments of transformers for a sharded run: one switch, and options without the prefix `fsdp_`."""
    if not config.fsdp:
        return {}
    details = config.fsdp_config.model_dump(exclude_unset=True, exclude_none=True) if config.fsdp_config else {}
    details.pop("final_state_dict_type", None)
    words = _words(config)
    if "offload" in words:
        details.setdefault("cpu_offload", True)
    if "shard_grad_op" in words:
        details.setdefault("reshard_after_forward", False)
    return {"fsdp": True, "fsdp_config": details or None}


def _words(config: MethodConfig) -> list[str]:
    given = config.fsdp
    return given.split() if isinstance(given, str) else given if isinstance(given, list) else []


FETCH = "deepspeed_configs"  # the name of the configs in `ebft fetch`


def shipped_configs() -> dict[str, Path]:
    """The configs that are part of the package, by name."""
    return {path.stem: path for path in sorted(Path(str(files("ebft") / FETCH)).glob("*.json"))}


def deepspeed_settings(deepspeed: str | dict[str, Any] | None) -> dict[str, Any] | None:
    """The DeepSpeed config that `deepspeed` names or is."""
    if deepspeed is None or isinstance(deepspeed, dict):
        return deepspeed
    with doing(f"reading deepspeed: {deepspeed}, a JSON file or one of {', '.join(shipped_configs())}"):
        return json.loads(shipped_configs().get(deepspeed, Path(deepspeed)).read_text(encoding="utf-8"))


def zero_stage(config: MethodConfig) -> Any:
    """The stage of ZeRO that a run uses; 0 without DeepSpeed."""
    zero = (deepspeed_settings(config.deepspeed) or {}).get("zero_optimization", {})
    return zero.get("stage", 0) if isinstance(zero, dict) else None


def check_deepspeed(config: MethodConfig) -> None:
    """Raise ConfigError for a DeepSpeed config that cannot be used by the run."""
    if config.deepspeed is None:
        return
    if zero_stage(config) == 3 and config.uses_server and config.adapter is not None:
        raise ConfigError(
            "deepspeed: ZeRO-3 does not support a vLLM server for an adapter, whose weights are in parts and are not "
            "sent. Use fsdp: true or deepspeed: zero2, or remove trl.use_vllm."
        )
    if find_spec("deepspeed") is None:
        raise MissingPackageError(
            "deepspeed requires the package deepspeed: pip install 'ebft[deepspeed]'. Or remove it to use DDP."
        )
