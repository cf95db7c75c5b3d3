"""The keys of FSDP2: what contradicts them, and the arguments of transformers that they become."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ebft.models.keys import FSDPKeys

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig

SHARDED = "SHARDED_STATE_DICT"
_WORDS = ("full_shard", "shard_grad_op", "auto_wrap", "offload")


def fsdp_problems(config: RunConfig) -> Iterator[str]:
    """What contradicts `fsdp` and `fsdp_config` in a config that has one of them."""
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
    if details.activation_checkpointing and config.gradient_checkpointing:
        yield "fsdp_config.activation_checkpointing and gradient_checkpointing are both set. Keep one of them."
    if details.state_dict_type == SHARDED and config.save_only_model:
        yield (
            f"save_only_model: true is incompatible with fsdp_config.state_dict_type: {SHARDED}. Remove one of them; "
            "the final model is saved whole with both types."
        )
    if config.save_only_model and config.load_best_model_at_end:
        yield "save_only_model and load_best_model_at_end cannot both be set with fsdp. Remove one of them."


def fsdp_arguments(config: RunConfig) -> dict[str, Any]:
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


def offloads(config: RunConfig) -> bool:
    """Whether the config asks to keep sharded parameters in CPU memory."""
    return bool((fsdp_arguments(config).get("fsdp_config") or {}).get("cpu_offload"))


def _words(config: RunConfig) -> list[str]:
    given = config.fsdp
    return given.split() if isinstance(given, str) else given if isinstance(given, list) else []
