"""The training methods, one file each: the keys that a method reads, the rows that it needs, its checks and metrics,
and how it builds its training arguments and its trainer.

To add a method, add a class in a new file and a line in `METHODS`; its `keys` become config keys. Code outside this
package does not depend on which method is used. A method that is selected with a key of its own instead of `rl` has a
line in `FLAGS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from ebft.config.section import Section
from ebft.methods.method import Method

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig

# (rl, ebft.mode) -> the class, imported on first use; mode is None for methods that do not read it.
METHODS: dict[tuple[str | None, str | None], str] = {
    ("ebft", "strided"): "ebft.methods.strided:Strided",
    ("ebft", "structured"): "ebft.methods.structured:Structured",
    ("grpo", None): "ebft.methods.grpo:GRPO",
    ("gdpo", None): "ebft.methods.grpo:GDPO",
    ("dpo", None): "ebft.methods.dpo:DPO",
    ("ipo", None): "ebft.methods.dpo:IPO",
    ("kto", None): "ebft.methods.kto:KTO",
    ("orpo", None): "ebft.methods.orpo:ORPO",
    ("simpo", None): "ebft.methods.orpo:SimPO",
    (None, None): "ebft.methods.sft:SFT",
}
# Keys that select a method when they are true and `rl` is not set -> the class.
FLAGS: dict[str, str] = {
    "reward_model": "ebft.methods.reward_models:RewardModel",
    "process_reward_model": "ebft.methods.reward_models:ProcessRewardModel",
}


def selected_method(config: RunConfig) -> Method:
    """The method that the keys of `config` select. Does not import torch."""
    flag = next(iter(_flags(config)), None)
    return find_method(config.rl, config.ebft.mode) if flag is None else _method_at(FLAGS[flag])


def find_method(rl: str | None, mode: str | None) -> Method:
    """The method for a config's `rl` and `ebft.mode`. Does not import torch."""
    return _method_at(METHODS.get((rl, mode)) or METHODS[rl, None])


def selecting_keys(config: RunConfig) -> dict[str, str | bool | None]:
    """The keys that select the method of `config`, with their values; `ebft.mode` only if the method depends on it."""
    keys = {"rl": config.rl, "ebft.mode": config.ebft.mode}
    keys = keys if tuple(keys.values()) in METHODS else {"rl": config.rl}
    return keys | {key: getattr(config, key) for key in FLAGS}


def contradictory_selection(config: RunConfig) -> Iterator[str]:
    """Keys that select different methods, as a message."""
    given = [f"rl: {config.rl}"] if config.rl else []
    given += [f"{key}: true" for key in _flags(config)]
    if len(given) > 1:
        yield f"{' and '.join(given)} select different methods. Keep one of them."


def own_keys() -> tuple[type[Section], ...]:
    """The sections of top-level keys that individual methods add to a config."""
    found = (_class_at(path).keys for path in (*METHODS.values(), *FLAGS.values()))
    return tuple(dict.fromkeys(keys for keys in found if keys.model_fields))


def foreign_keys(config: RunConfig) -> set[str]:
    """The top-level keys of methods that the method of `config` does not read."""
    return {name for keys in own_keys() for name in keys.model_fields} - set(config.method.keys.model_fields)


def _flags(config: RunConfig) -> list[str]:
    return [key for key in FLAGS if getattr(config, key)]


@cache
def _method_at(path: str) -> Method:
    return _class_at(path)()


def _class_at(path: str) -> type[Method]:
    module, name = path.split(":")
    return getattr(import_module(module), name)


__all__ = [
    "FLAGS",
    "METHODS",
    "Method",
    "contradictory_selection",
    "find_method",
    "foreign_keys",
    "own_keys",
    "selected_method",
    "selecting_keys",
]
