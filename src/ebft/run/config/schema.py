"""The run config: one class with the type, default, bounds and description of every key, checked when it is created."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import ValidationError, create_model, model_validator

from ebft.config.keys.serving import ServerSettings
from ebft.config.load import read_values
from ebft.config.section import Section
from ebft.config.user_functions import search_folders, with_plugin_args
from ebft.config.validation_errors import raise_config_error
from ebft.errors import ConfigError
from ebft.methods.base_config import GROUPS as COMMON
from ebft.methods.base_config import MethodKeys
from ebft.methods.method import Method, MethodConfig, own_keys, selected_method
from ebft.run.config.combinations import refuse_contradictions, resolve

if TYPE_CHECKING:
    from ebft.config.keys.data import NemoGymKeys
    from ebft.methods.preferences import DPOKeys, KTOKeys, ORPOKeys, SimPOKeys
    from ebft.methods.reward_models import RewardModelKeys

    class OwnKeys(NemoGymKeys, RewardModelKeys, DPOKeys, KTOKeys, ORPOKeys, SimPOKeys): ...

    class KeysOfMethods(OwnKeys, MethodKeys): ...
else:
    # Keys that individual methods declare, and all keys of methods; pydantic lists the last base class first.
    OwnKeys = create_model("OwnKeys", __base__=own_keys() or Section)
    KeysOfMethods = create_model("KeysOfMethods", __base__=(OwnKeys, MethodKeys))

GROUPS: dict[str, type[Section]] = {"Method": MethodKeys, "Method-specific keys": OwnKeys, **COMMON}


class RunConfig(MethodConfig, KeysOfMethods):
    """The config of a run, created by `load_config` or `RunConfig.from_dict`.

    After validation, `attn_implementation` is the only attention key that is set (None: the model's default).
    """

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunConfig":
        """Create a config from nested dicts and lists. Raises ConfigError that lists each invalid key's dotted path."""
        values = _paths_as_text(values)
        values = with_plugin_args(values, values.keys() - cls.model_fields) if isinstance(values, dict) else values
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise_config_error(error, cls)

    @model_validator(mode="after")
    def _resolve(self) -> Self:
        refuse_contradictions(self)
        resolve(self)
        return self

    @property
    def method(self) -> Method:
        """The training method of this run, a class in `ebft.methods`."""
        return selected_method(self)

    @property
    def server_settings(self) -> ServerSettings:
        """The server to start, on the port of `vllm:` if that is set, or else the one that the trainer connects to."""
        port = self.vllm.port if "port" in self.vllm.model_fields_set else self.server_address[1]
        depth, agents = self.trl.prefetch_depth, self.nemo_gym_enabled and self.nemo_gym_multi_turn
        return ServerSettings(self, self.vllm, port, self.seed, depth, agents)


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Read the YAML file at `path`, apply `overrides` (`dotted.key=value`), and check the result.

    User-defined modules are also looked up in the folder of the file.

    Raises ConfigError with the file and line of malformed YAML, or with each invalid key and its allowed values.
    """
    values = read_values(path, overrides)
    search_folders(os.getcwd(), str(Path(path).expanduser().resolve().parent))
    try:
        return RunConfig.from_dict(values)
    except ConfigError as error:
        raise ConfigError(f"{path}:\n{error}") from None


def _paths_as_text(value: Any) -> Any:
    """`value` with pathlib paths, at any depth, converted to strings, as the schema requires."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, dict):
        return {key: _paths_as_text(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_paths_as_text(item) for item in value]
    return value
