"""Arguments shared by several commands, and the names of options.

CONFIG, FOLDER or CONFIG|FOLDER, what a command reads, is its first argument; overrides (key=value) follow a config, and
may be written as options (--key value) unless the command has an option of that name. `--output` is where the result
is written, `--model` a model of any kind, `--base-model` the one that it started from, `--count` a number of items.
An option that stands for a config key has the key's name with dashes. A renamed option keeps its former name.
"""

import difflib
import re
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ebft.catalog import MODELS, locate
from ebft.config.axolotl import SAME_KEYS, UNSUPPORTED_KEYS
from ebft.config.validation_errors import dotted_keys, model_at
from ebft.errors import ConfigError
from ebft.methods.base_config import FETCH
from ebft.run.config.reference import choices_of, option_groups, takes_text
from ebft.run.config.schema import RunConfig, load_config
from ebft.tools.console import WRONG_INPUT, say_error
from ebft.tools.dashboard.rollouts import TERMS, all_samples

COPIED = {"examples": "example configs to start from", FETCH: "DeepSpeed configs"}  # by `ebft fetch`
_SAMPLES_READ = 50  # of a log of rollouts, for the names of its terms
_CONFIGS = (".yaml", ".yml")
_BOOLEANS = {"true": "true", "yes": "true", "1": "true", "false": "false", "no": "false", "0": "false"}
_SLIP = 0.75  # similarity of an unknown option to a known one that is suggested


class ConfigCommand(TyperCommand):
    """A command whose overrides may also be written as options: `--learning-rate 1e-4`, `--ebft.stride=4`, `--bf16`."""

    section = ""  # of the config, whose keys need no prefix

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            args = list(self._as_overrides(ctx, deque(args)))
        except ConfigError as error:
            if not ctx.resilient_parsing:  # of an unfinished line, for the Tab key
                say_error(str(error))
                raise typer.Exit(WRONG_INPUT) from None
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Options of the command, and keys as options that begin with a letter that was typed."""
        kind, key = type(super().shell_complete(ctx, "--")[0]), incomplete[2:].replace("-", "_")  # --help is one
        keys = _keys(key) if incomplete.startswith("--") and key else ()
        return super().shell_complete(ctx, incomplete) + [kind(f"--{each}".replace("_", "-")) for each in keys]

    def _as_overrides(self, ctx: Any, left: deque[str]) -> Iterator[str]:
        """The words of a command line, with `key=value` in place of options that are not the command's. Those before
        the first argument, which is the config, follow it."""
        parameters = self.get_params(ctx)
        own = {name: each for each in parameters for name in (*each.opts, *each.secondary_opts)}
        early: list[str] | None = []  # None after the first argument
        while left and left[0] != "--":
            word = left.popleft()
            name, equals, value = word.partition("=")
            if name in own or not name.startswith("--"):
                yield word
                if name in own and not equals and left and not getattr(own[name], "is_flag", True):
                    yield left.popleft()
                elif early is not None and not word.startswith("-"):
                    yield from early
                    early = None
                continue
            override = self._override(name, value if equals else None, left, list(own))
            if early is None:
                yield override
            else:
                early.append(override)
        if not any(each.param_type_name == "argument" and each.required for each in parameters):
            yield from early or []  # else, the config is missing
        yield from left

    def _override(self, name: str, value: str | None, left: deque[str], own: list[str]) -> str:
        """`key=value` for the option `name` and its value, which may be the next word, or for one without a value."""
        key, is_negated = self._key_of(name[2:].replace("-", "_"))
        if key is None:
            given, keys = name.replace("_", "-"), [f"--{key.replace('_', '-')}" for key in dotted_keys(RunConfig)]
            keys = [*(key.replace(f"--{self.section}.", "--") for key in keys), *keys] if self.section else keys
            near = [key for key in keys if key.rpartition(".")[2] == given[2:]]
            near += difflib.get_close_matches(given, own + keys, n=1, cutoff=_SLIP)
            hint = f"Did you mean {near[0]}?" if near else "Run `ebft config` to list all keys."
            raise ConfigError(f"Unknown option {name!r:.100}. {hint}")
        choices, following = choices_of(key), left[0] if left else ""
        if is_negated:
            if value is not None or following.lower() in _BOOLEANS:
                raise ConfigError(f"{name} has no value. Write {name} alone, or --{name.removeprefix('--no-')} VALUE.")
            return f"{key}=false"
        is_text = takes_text(key) and not following.startswith("-") and not following.endswith(_CONFIGS)
        is_value = following.lower() in (*choices, *_BOOLEANS) or (is_text and following and "=" not in following)
        if value is None and "true" in choices and not is_value:
            return f"{key}=true"
        if value is None:
            if not left or following.startswith("--"):
                raise ConfigError(f"{name} requires a value: {name} VALUE.")
            value = left.popleft()
        return f"{key}={_BOOLEANS.get(value.lower(), value) if 'true' in choices else value}"

    def _key_of(self, name: str) -> tuple[str | None, bool]:
        """The key that an option names, or None, and whether it is `--no-KEY` of a key that is true or false."""
        section = model_at(RunConfig, (self.section,)) if self.section else None
        if section is not None and name in section.model_fields:
            return f"{self.section}.{name}", False
        # The last have messages of their own.
        known = {*RunConfig.model_fields, *SAME_KEYS, *UNSUPPORTED_KEYS}
        if name.partition(".")[0] in known:
            return name, False
        if name.startswith("no_"):
            key, _ = self._key_of(name.removeprefix("no_"))
            return (key, True) if key is not None and "true" in choices_of(key) else (None, False)
        return None, False


def complete_model(incomplete: str) -> list[str]:
    """Names of models of `ebft fetch`; the shell itself completes paths where none begins with `incomplete`."""
    return [name for name in MODELS if name.startswith(incomplete)]


def complete_term(ctx: typer.Context, incomplete: str) -> list[str]:
    """Terms of rewards in the run whose folder is given, or of all runs."""
    # An option without its value ends the parsing, so FOLDER is still among the unparsed arguments.
    folder = ctx.params.get("folder") or next((Path(word) for word in ctx.args if Path(word).is_dir()), None)
    samples = islice(all_samples(folder), _SAMPLES_READ) if folder is not None else ()
    found = dict.fromkeys(term for sample in samples for term in sample.terms)
    return [term for term in found or TERMS if term.startswith(incomplete)]


def complete_override(ctx: typer.Context, incomplete: str) -> list[str]:
    """Config keys, or after `key=` the values of a key that has a few."""
    before = list(ctx.params.get("overrides") or ctx.params.get("words") or [])
    # Bash splits words at `=`. Click removes a last word `=`, but not one before the beginning of a value.
    if before[-1:] == ["="]:
        before.pop()
    elif incomplete:
        before.clear()
    if before and "=" not in before[-1]:
        return [value for value in choices_of(before[-1]) if value.startswith(incomplete)]
    key, equals, _ = incomplete.partition("=")
    keys = [key] if equals else list(_keys(incomplete))
    if equals or (len(keys) == 1 and choices_of(keys[0])):
        return [f"{keys[0]}={value}" for value in choices_of(keys[0])]
    return [f"{key}=" for key in keys]


def complete_word(ctx: typer.Context, incomplete: str) -> list[str]:
    """For `ebft config`: keys to search for, and after the first word, overrides of the file."""
    if ctx.params.get("words"):
        return complete_override(ctx, incomplete)
    return [] if ctx.params.get("check") else list(_keys(incomplete))  # the shell completes the path of the file


def _keys(incomplete: str) -> Iterator[str]:
    """The keys that begin with `incomplete`; elements of lists have the number in it, or 0."""
    number = re.search(r"\.(\d+)(\.|$)", incomplete)
    for options in option_groups().values():
        for option in options:
            key = option.key.replace(".N.", f".{number[1] if number else 0}.")
            if key.startswith(incomplete) and (key == option.key or "." in incomplete):
                yield key


def option(
    metavar: str | None,
    text: str,
    complete: Callable[..., list[str]] | None = None,
    names: str | tuple[str, ...] = (),
    **settings: Any,
) -> Any:
    """An option with a value, named after its argument unless it has `names`; `complete` is for the Tab key."""
    names = (names,) if isinstance(names, str) else names
    return typer.Option(*names, metavar=metavar, help=text, show_default=False, autocompletion=complete, **settings)


def argument(metavar: str, text: str, complete: Callable[..., list[str]] | None = None) -> Any:
    """An argument, whose default is not shown."""
    return typer.Argument(metavar=metavar, help=text, show_default=False, autocompletion=complete)


ConfigFile = Annotated[Path, argument("CONFIG", "The YAML config file.")]
RunFolder = Annotated[Path, argument("FOLDER", "The output_dir of a run, running or ended.")]
ConfigOrFolder = Annotated[Path, argument("CONFIG|FOLDER", "A config, or the folder of a model or an adapter.")]
Overrides = Annotated[
    list[str] | None,
    argument("[KEY=VALUE]...", "Values that override the config, also as --key VALUE.", complete=complete_override),
]
BaseModel = Annotated[
    str | None,
    option("MODEL", "Base model, if it is not where the adapter or the model card says.", complete=complete_model),
]
LoraModelDir = Annotated[str | None, option("DIR", "With a config: folder of the adapter. Default: output_dir.")]
OUTPUT = ("--output", "--to")


def config_and_model(
    source: Path, overrides: list[str] | None, lora_model_dir: str | None = None
) -> tuple[RunConfig | None, Path]:
    """The config that CONFIG|FOLDER names, or None, and the folder of the model: with a config, its `output_dir`."""
    is_name = not source.exists() and str(source) in MODELS
    if source.is_dir() or is_name:
        if overrides or lora_model_dir:
            given = "--lora-model-dir requires" if lora_model_dir else "overrides require"
            raise ConfigError(f"{source} is a folder: {given} a config.")
        return None, (locate(str(source), "model", "FOLDER") or source) if is_name else source
    config = load_config(source, overrides or [])
    return config, Path(lora_model_dir or config.output_dir).expanduser()
