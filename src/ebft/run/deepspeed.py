"""DeepSpeed: the configs that are part of the package, and checks of the one that a run uses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebft.errors import ConfigError, cause

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig

FETCH = "deepspeed_configs"  # the name of the configs in `ebft fetch`


def shipped_configs() -> dict[str, Path]:
    """The configs that are part of the package, by name."""
    return {path.stem: path for path in sorted(Path(str(files("ebft") / FETCH)).glob("*.json"))}


def deepspeed_settings(deepspeed: str | dict[str, Any] | None) -> dict[str, Any] | None:
    """The DeepSpeed config that `deepspeed` names or is. Raises ConfigError if it cannot be read."""
    if deepspeed is None or isinstance(deepspeed, dict):
        return deepspeed
    path = shipped_configs().get(deepspeed, Path(deepspeed))
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


def zero_stage(config: RunConfig) -> Any:
    """The stage of ZeRO that a run uses; 0 without DeepSpeed. Raises ConfigError if its config cannot be read."""
    zero = (deepspeed_settings(config.deepspeed) or {}).get("zero_optimization", {})
    return zero.get("stage", 0) if isinstance(zero, dict) else None


def check_deepspeed(config: RunConfig) -> None:
    """Raise ConfigError for a DeepSpeed config that cannot be used by the run."""
    if config.deepspeed is None:
        return
    for problem in _problems(zero_stage(config), config):
        raise ConfigError(problem)
    if find_spec("deepspeed") is None:
        raise ConfigError(
            "deepspeed requires the package deepspeed: pip install 'ebft[deepspeed]'. Or remove it to use DDP."
        )


def _problems(stage: Any, config: RunConfig) -> Iterator[str]:
    if type(stage) is not int or stage not in (0, 1, 2, 3):  # true is equal to 1
        yield f"deepspeed: zero_optimization.stage must be 0, 1, 2 or 3, got {stage!r:.60}."
    if stage == 3 and not config.method.runs_plain_model:
        yield (
            "deepspeed: ZeRO-3 is only supported by SFT. It partitions the parameters while the model is loaded, "
            f"before {config.method.name} has copied the model and checked its passes. Use fsdp: true, which "
            "shards the parameters, too, or deepspeed: zero2."
        )
