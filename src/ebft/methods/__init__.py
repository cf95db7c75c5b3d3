"""The methods of training, one file each: which keys one reads, which rows it needs, what it checks and measures,
and how it builds its arguments and its trainer.

A new method is a class in a file of its own and a line in `METHODS`. Nothing outside this package asks which one it is.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

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
    module, name = (METHODS.get((rl, mode)) or METHODS[rl, None]).split(":")
    return getattr(import_module(module), name)()


__all__ = ["METHODS", "Method", "find_method"]
