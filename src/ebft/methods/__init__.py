"""The methods of training, one file each: which keys one reads, which rows it needs, what it checks and measures,
and how it builds its arguments and its trainer.

A new method is a class in a file of its own and a line in `METHODS`; its `keys` are keys of the config then. Nothing
outside this package asks which one it is.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from ebft.config.section import Section
from ebft.methods.method import Method

# (rl, ebft.mode) -> the class; mode None where the method does not read it. Imported when a config names it.
METHODS: dict[tuple[str | None, str | None], str] = {
    ("ebft", "strided"): "ebft.methods.strided:Strided",
    ("ebft", "structured"): "ebft.methods.structured:Structured",
    ("grpo", None): "ebft.methods.grpo:GRPO",
    (None, None): "ebft.methods.sft:SFT",
}


@cache
def find_method(rl: str | None, mode: str | None) -> Method:
    """The method of a config's `rl` and `ebft.mode`; imports no torch."""
    return _class_at(METHODS.get((rl, mode)) or METHODS[rl, None])()


def own_keys() -> tuple[type[Section], ...]:
    """The sections of top-level keys that single methods add to a config."""
    found = (_class_at(path).keys for path in METHODS.values())
    return tuple(dict.fromkeys(keys for keys in found if keys.model_fields))


def _class_at(path: str) -> type[Method]:
    module, name = path.split(":")
    return getattr(import_module(module), name)


__all__ = ["METHODS", "Method", "find_method", "own_keys"]
