"""The config that is passed to transforms: attributes, and also `cfg["key"]` and `cfg.get("key")`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig


class ConfigView(Mapping):
    """A run config that can also be used as a mapping of its keys, as in other trainers; unknown keys are absent."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def __getattr__(self, key: str) -> Any:
        return getattr(self.__dict__["_config"], key)

    def __getitem__(self, key: str) -> Any:
        if key not in type(self._config).model_fields:
            raise KeyError(key)
        return getattr(self._config, key)

    def __iter__(self) -> Iterator[str]:
        return iter(type(self._config).model_fields)

    def __len__(self) -> int:
        return len(type(self._config).model_fields)
