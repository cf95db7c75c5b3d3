"""The keys of FSDP2: what contradicts them, and the arguments of transformers that they become."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebft.errors import ConfigError, MissingPackageError, cause
from ebft.models.keys import FSDPKeys

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
            f"save_only_model: true is incompatible with fsdp_config.state_dict_type: {SHARDED}. Remove one of them; "
            "the final model is saved whole with both types."
        )
    if config.save_only_model and config.load_best_model_at_end:
        yield "save_only_model and load_best_model_at_end cannot both be set with fsdp. Remove one of them."


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


def offloads(config: MethodConfig) -> bool:
    """Whether the config asks to keep sharded parameters in CPU memory."""
    return bool((fsdp_arguments(config).get("fsdp_config") or {}).get("cpu_offload"))


def _words(config: MethodConfig) -> list[str]:
    given = config.fsdp
    return given.split() if isinstance(given, str) else given if isinstance(given, list) else []


FETCH = "deepspeed_configs"  # the name of the configs in `ebft fetch`
_COMPILED = "_torch_compile"  # the end of names that axolotl has


def shipped_configs() -> dict[str, Path]:
    """The configs that are part of the package, by name."""
    return {path.stem: path for path in sorted(Path(str(files("ebft") / FETCH)).glob("*.json"))}


def deepspeed_settings(deepspeed: str | dict[str, Any] | None) -> dict[str, Any] | None:
    """The DeepSpeed config that `deepspeed` names or is. Raises ConfigError if it cannot be read."""
    if deepspeed is None or isinstance(deepspeed, dict):
        return deepspeed
    path = shipped_configs().get(deepspeed, Path(deepspeed))
    if path.stem.endswith(_COMPILED) and not path.is_file():
        stage = path.stem.removesuffix(_COMPILED)
        raise ConfigError(
            f"deepspeed: {deepspeed} is not part of ebft, since DeepSpeed no longer reads the section that asks for "
            f"torch.compile there. Set deepspeed: {stage}, and torch_compile: true for SFT."
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"deepspeed: {deepspeed} cannot be read as JSON ({cause(error)}). Give the path to a JSON file, or one of "
            f"{', '.join(shipped_configs())}, which `ebft fetch {FETCH}` copies."
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"deepspeed: {deepspeed} must contain a JSON object, got {found!r:.60}.")
    return found


def zero_stage(config: MethodConfig) -> Any:
    """The stage of ZeRO that a run uses; 0 without DeepSpeed. Raises ConfigError if its config cannot be read."""
    zero = (deepspeed_settings(config.deepspeed) or {}).get("zero_optimization", {})
    return zero.get("stage", 0) if isinstance(zero, dict) else None


def check_deepspeed(config: MethodConfig) -> None:
    """Raise ConfigError for a DeepSpeed config that cannot be used by the run."""
    if config.deepspeed is None:
        return
    for problem in _problems(zero_stage(config), config):
        raise ConfigError(problem)
    if find_spec("deepspeed") is None:
        raise MissingPackageError(
            "deepspeed requires the package deepspeed: pip install 'ebft[deepspeed]'. Or remove it to use DDP."
        )


def _problems(stage: Any, config: MethodConfig) -> Iterator[str]:
    if type(stage) is not int or stage not in (0, 1, 2, 3):  # true is equal to 1
        yield f"deepspeed: zero_optimization.stage must be 0, 1, 2 or 3, got {stage!r:.60}."
    if stage == 3 and config.uses_server and config.adapter is not None:
        yield (
            "deepspeed: ZeRO-3 does not support a vLLM server for an adapter, whose weights are in parts and are not "
            "sent. Use fsdp: true or deepspeed: zero2, or remove trl.use_vllm."
        )
    ours = {"bf16": False if config.fp16 else config.bf16, "fp16": config.fp16}
    given = "fp16: true" if config.fp16 else f"bf16: {str(config.bf16).lower()}"
    for name, wanted in ours.items():
        section = (deepspeed_settings(config.deepspeed) or {}).get(name)
        enabled = section.get("enabled") if isinstance(section, dict) else None
        if isinstance(enabled, bool) and wanted not in ("auto", enabled):
            value = str(enabled).lower()
            yield (
                f"deepspeed: the config has {name}.enabled: {value}, which contradicts {given}. Set {name}: {value}, "
                "or enabled: auto, as deepspeed: zero3 has, with which the precision is that of the run."
            )
