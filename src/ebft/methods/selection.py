"""The method that the keys of a config select, and the keys that single methods add to a config."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module

from ebft.config.base import BaseConfig
from ebft.config.section import Section
from ebft.methods import FLAGS, METHODS
from ebft.methods.method import Method, MethodConfig


def selected_method(config: BaseConfig) -> Method:
    """The method that the keys of `config` select. Does not import torch."""
    flag = next(iter(_flags(config)), None)
    return find_method(config.rl, config.ebft.mode) if flag is None else _method_at(FLAGS[flag])


def find_method(rl: str | None, mode: str | None) -> Method:
    """The method for a config's `rl` and `ebft.mode`. Does not import torch."""
    return _method_at(METHODS.get((rl, mode)) or METHODS[rl, None])


def selecting_keys(config: BaseConfig) -> dict[str, str | bool | None]:
    """The keys that select the method of `config`, with their values; `ebft.mode` only if the method depends on it."""
    keys = {"rl": config.rl, "ebft.mode": config.ebft.mode}
    keys = keys if tuple(keys.values()) in METHODS else {"rl": config.rl}
    return keys | {key: getattr(config, key) for key in FLAGS}


def contradictory_selection(config: BaseConfig) -> Iterator[str]:
    """Keys that select different methods, as a message."""
    given = [f"rl: {config.rl}"] if config.rl else []
    given += [f"{key}: true" for key in _flags(config)]
    if len(given) > 1:
        yield f"{' and '.join(given)} select different methods. Keep one of them."


def own_keys() -> tuple[type[Section], ...]:
    """The sections of top-level keys that individual methods add to a config."""
    found = (_class_at(path).keys for path in (*METHODS.values(), *FLAGS.values()))
    return tuple(dict.fromkeys(keys for keys in found if keys.model_fields))


def foreign_keys(config: MethodConfig) -> set[str]:
    """The top-level keys of methods that the method of `config` does not read."""
    return {name for keys in own_keys() for name in keys.model_fields} - set(config.method.keys.model_fields)


def _flags(config: BaseConfig) -> list[str]:
    return [key for key in FLAGS if getattr(config, key)]


@cache
def _method_at(path: str) -> Method:
    return _class_at(path)()


def _class_at(path: str) -> type[Method]:
    module, name = path.split(":")
    return getattr(import_module(module), name)
