"""The run config: one class with the type, default, bounds and description of every key, checked when it is created;
and its values in a YAML file and in overrides (`ebft.stride=4`, `datasets.0.path=notes.txt`)."""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import ValidationError, create_model, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from ebft.config.axolotl import SAME_KEYS, with_one_name
from ebft.config.keys.serving import ServerSettings
from ebft.config.section import Section
from ebft.config.user_functions import search_folders, with_plugin_args
from ebft.config.validation_errors import keys_of_others, raise_config_error
from ebft.errors import ConfigError, shortened, warn
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
        return _checked(_plain(values), lambda key: "")

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

    User-defined modules are also looked up in the folder of the file. A key of the file that is like none of a config,
    as other tools have them, is a warning.

    Raises ConfigError with the file and line of malformed YAML, or with each invalid key and its allowed values.
    """
    values = read_values(path, overrides)
    search_folders(os.getcwd(), str(Path(path).expanduser().resolve().parent))
    try:
        return _checked(values, partial(_place, path))
    except ConfigError as error:
        placed = lambda found: found[0] + _place(path, found[1])
        raise ConfigError(f"{path}:\n" + re.sub(r"(?m)^Unknown key '(.+?)'", placed, str(error))) from None


def _checked(values: Any, place: Callable[[str], str]) -> RunConfig:
    values = with_plugin_args(values, values.keys() - RunConfig.model_fields) if isinstance(values, dict) else values
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        foreign = {key: line for key in keys_of_others(error, RunConfig) if (line := place(key))}
        if not foreign:
            raise_config_error(error, RunConfig)
    for key, line in foreign.items():
        warn(f"Unknown key {key!r}{line} has no effect. Run `ebft config` to list all keys.")
        *parts, last = key.split(".")
        del reduce(lambda owner, part: owner[int(part) if isinstance(owner, list) else part], parts, values)[last]
    return _checked(values, place)


def _place(path: str | os.PathLike[str], key: str) -> str:
    """The line of a dotted key in a file, in parentheses; empty for a key of an override, or if the file has gone."""
    with suppress(OSError, StopIteration, ValueError, IndexError, TypeError, AttributeError):
        node = YAML(typ="safe", pure=True).compose(Path(path).expanduser())
        for part in key.split("."):
            pairs = node.value if isinstance(node.value[0], tuple) else [(each, each) for each in node.value]
            same = (part, *(name for name, own in SAME_KEYS.items() if own == part))
            named = (pair for number, pair in enumerate(pairs) if pair[0].value in same or part == str(number))
            start, node = next(named)
        return f" (line {start.start_mark.line + 1})"
    return ""


def _plain(value: Any) -> Any:
    """A copy of `value` with lists for tuples and text for pathlib's paths, at any depth, as the schema requires."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


_SHOWN = 100  # characters of an override in messages


def read_values(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The keys and values of the YAML file at `path` with `overrides`, not yet checked."""
    name = shortened(path, _SHOWN)
    try:
        values = parse_yaml(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        line, words = problem(error)
        where = f"{name}, line {line}" if line else name
        raise ConfigError(f"Cannot read config file {where}: {shortened(words)}.") from None
    if not isinstance(values, dict):
        given = "is empty" if values is None else f"is {values!r:.60}"
        raise ConfigError(f"Config file {name} {given}; expected key: value, with at least base_model and datasets.")
    values = with_one_name(values, SAME_KEYS)
    apply_overrides(values, overrides)
    return values


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Write each `dotted.key=value` into the nested `values`; values are parsed as YAML, an empty one means unset."""
    for override in overrides:
        try:
            key, value = _split(override)
            first, *rest = key.split(".")
            _assign(values, [SAME_KEYS.get(first, first), *rest], value)
        except ConfigError as error:
            raise ConfigError(f"Invalid override {shortened(override, _SHOWN)!r}: {error}") from None


def _split(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError("expected key=value, for example ebft.stride=4.")
    if re.match(r"[^\"'\[{|>&*!].*\s#", text.strip()):  # a comment of YAML; on a command line it is a part of the text
        return key, text.strip()
    try:
        return key, parse_yaml(text)
    except YAMLError as error:
        words = shortened(problem(error)[1])
        raise ConfigError(f"the value is not valid YAML: {words}. Quote it: {key:.100}='\"...\"'.") from None


def _assign(values: Any, path: list[str], value: Any) -> None:
    """Follow `path` and set its last part, creating missing sections; an index one past the end adds an element."""
    part, *rest = path
    if not isinstance(values, (dict, list)):
        raise ConfigError(f"cannot set {part!r:.100} in {values!r:.100}, which has no keys.")
    step: Any = part
    if isinstance(values, list):
        if not (part.isascii() and part.isdecimal()) or int(part) > len(values):
            raise ConfigError(f"{part!r:.100} is not a valid index for a list of length {len(values)}, from 0.")
        step = int(part)
        values += [None] * (step == len(values))
    if not rest:
        values[step] = value
        return
    if (values[step] if isinstance(values, list) else values.get(step)) is None:
        values[step] = [] if rest[0].isdecimal() else {}
    _assign(values[step], rest, value)


class _Values(SafeConstructor):
    """Only plain values, without dates, which no key takes; a key can be repeated with an equal or empty value."""

    def check_mapping_key(self, node: Any, key_node: Any, mapping: Any, key: Any, value: Any) -> bool:
        if isinstance(key, tuple):
            raise YAMLError("a key must be a scalar, not a list or a mapping")
        former = mapping.get(key)
        is_same = repr(value) == repr(former) and not isinstance(value, dict | list)
        if key not in mapping or not (is_same or former is None or value in (None, "")):
            return super().check_mapping_key(node, key_node, mapping, key, value)
        lines = [each.start_mark.line + 1 for each, _ in node.value if each.value == key_node.value]
        warn(f"{key} is set twice, to one value (lines {lines[0]} and {key_node.start_mark.line + 1}).")
        return former is None


_Values.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def parse_yaml(text: str) -> Any:
    """The value of `text`, in which each alias (*name) is a copy of its anchor. Raises YAMLError for any other text."""
    if re.search(r"^%YAML\s+(?!1\.2\b)", text, re.MULTILINE):
        raise YAMLError("configs are read as YAML 1.2, but the %YAML line declares another version: remove it")
    try:
        parser = YAML(typ="safe", pure=True)  # pure: the parser in C reads YAML 1.1
        parser.Constructor = _Values
        return _plain(parser.load(text))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:  # !!int in front of a word
        raise YAMLError(f"a value does not have the type of its tag ({error})") from error
    except RecursionError:
        raise YAMLError("nesting is too deep, or an alias (*name) refers to a value that contains it") from None


_TAB = r"character '\t' that cannot start any token"  # words of ruamel.yaml


def problem(error: Exception) -> tuple[int | None, str]:
    """The line (counted from 1), if it is known, and the message of an error of a file in YAML."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        words = ", ".join(part for part in (error.context, error.problem) if part)
        return error.problem_mark.line + 1, words.replace(_TAB, "a tab: indent with spaces only")
    return None, str(error)
