"""The training methods, one file each: the keys that a method reads, the rows that it needs, its checks and metrics,
and how it builds its training arguments and its trainer.

To add a method, add a class in a new file and a line in `METHODS`; its `keys` become config keys. Code outside this
package does not depend on which method is used.
"""

from __future__ import annotations

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
    ("gdpo", None): "ebft.methods.gdpo:GDPO",
    ("dpo", None): "ebft.methods.dpo:DPO",
    ("ipo", None): "ebft.methods.ipo:IPO",
    ("kto", None): "ebft.methods.kto:KTO",
    ("orpo", None): "ebft.methods.orpo:ORPO",
    ("simpo", None): "ebft.methods.simpo:SimPO",
    (None, None): "ebft.methods.sft:SFT",
}


@cache
def find_method(rl: str | None, mode: str | None) -> Method:
    """The method for a config's `rl` and `ebft.mode`. Does not import torch."""
    return _class_at(METHODS.get((rl, mode)) or METHODS[rl, None])()


def selecting_keys(config: RunConfig) -> dict[str, str | None]:
    """The keys that select the method of `config`, with their values; `ebft.mode` only if the method depends on it."""
    keys = {"rl": config.rl, "ebft.mode": config.ebft.mode}
    return keys if tuple(keys.values()) in METHODS else {"rl": config.rl}


def own_keys() -> tuple[type[Section], ...]:
    """The sections of top-level keys that individual methods add to a config."""
    found = (_class_at(path).keys for path in METHODS.values())
    return tuple(dict.fromkeys(keys for keys in found if keys.model_fields))


def _class_at(path: str) -> type[Method]:
    module, name = path.split(":")
    return getattr(import_module(module), name)


__all__ = ["METHODS", "Method", "find_method", "own_keys", "selecting_keys"]
