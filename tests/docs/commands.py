"""Parses commands as the command line does, without running them."""

import re
import shlex
from copy import deepcopy

import typer

from ebft.errors import ConfigError
from ebft.run.config.schema import RunConfig, apply_overrides, parse_yaml
from ebft.tools.cli import app
from tests.docs.blocks import ROOT

COMMANDS = typer.main.get_command(app).commands
OPERATORS = set("|;&><")
SUBSTITUTION = re.compile(r"\$\((.*?)\)")
PLACEHOLDERS = {"KEY=VALUE": None, "SEED": "0"}  # what the text writes for a value; None leaves it out
# Valid configs to which parts of configs and overrides are added; a part must fit one of them.
DATA = {"base_model": "some/model", "output_dir": "out"}
LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
data = lambda kind: {"datasets": [{"path": "a", "type": kind}]}
STRIDED = {"rl": "ebft", "ebft": {"mode": "strided"}}
BASES = {
    "strided": STRIDED | data("completion"),
    "structured": {"rl": "ebft", "micro_batch_size": 4, **LORA, **data("ebft_opencode.transform")},
    "pairs": {"micro_batch_size": 4, "sequence_len": 1024, **STRIDED, **data("ebft_strided_structured.transform")},
    "own data": {"rl": "grpo", "micro_batch_size": 8},  # for methods with data keys of their own
    "sft": data("completion"),
}


def commands_in(line: str) -> list[list[str]]:
    """The arguments of every `ebft ...` in a line of a shell script, also behind torchrun or in `$(...)`."""
    inner = [arguments for part in SUBSTITUTION.findall(line) for arguments in commands_in(part)]
    lexer = shlex.shlex(SUBSTITUTION.sub("SUBSTITUTED", line), posix=True, punctuation_chars="|;&><")
    lexer.whitespace_split, lexer.commenters = True, "#"
    parts: list[list[str]] = [[]]
    for token in lexer:
        if set(token) <= OPERATORS:
            parts.append([])
        else:
            parts[-1].append(token)
    return inner + [arguments for words in parts if (arguments := _arguments(words)) is not None]


def _arguments(words: list[str]) -> list[str] | None:
    """What follows `ebft` or `-m ebft`; None for other programs."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if words[:1] == ["ebft"]:
        return words[1:]
    module = words.index("-m") + 1 if "-m" in words[:-1] else 0
    return words[module + 1 :] if module and words[module] == "ebft" else None


def check_command(arguments: list[str], incomplete: bool = False) -> None:
    """Raise AssertionError for unknown commands, options, keys and values; `incomplete` allows missing arguments."""
    given = [PLACEHOLDERS.get(word, word) for word in arguments]
    given = [word for word in given if word is not None]
    if not given or given[0] in ("COMMAND", "--version", "--install-completion"):
        return
    assert given[0] in COMMANDS, f"unknown command {given[0]}"
    try:
        context = COMMANDS[given[0]].make_context(given[0], given[1:])
    except typer.Exit as ended:
        assert ended.exit_code == 0, "unknown option"  # 0: --help
        return
    except Exception as error:
        missing = type(error).__name__ == "MissingParameter" or "requires an argument" in str(error)
        assert incomplete and missing, f"{type(error).__name__}: {error}"
        return
    values = context.params
    overrides = values.get("overrides") or ("check" in values and (values["words"] or [])[1:]) or []
    check_overrides([override for override in overrides if override], config_values(values))


def config_values(parameters: dict) -> dict | None:
    """The config that a command names, if it is one of this repository."""
    path = parameters.get("config") or parameters.get("source") or next(iter(parameters.get("words") or []), None)
    file = next((root / path for root in (ROOT, ROOT / "examples") if path and (root / path).is_file()), None)
    return parse_yaml(file.read_text(encoding="utf-8")) if file else None


def check_overrides(overrides: list[str], config: dict | None) -> None:
    """Raise AssertionError if no valid config accepts the overrides; `config` is the one that they are for."""
    bases = list(BASES.values()) if config is None else [config]
    _fits_one(bases, lambda values: apply_overrides(values, overrides), f"overrides {overrides}")


def check_config(part: dict) -> None:
    """Raise AssertionError if the config, or the part of one, is not valid."""
    complete = "base_model" in part and not part.keys().isdisjoint({"datasets", "pretraining_dataset"})
    _fits_one([{}] if complete else list(BASES.values()), lambda values: _merge(values, part), str(part))


def _fits_one(bases: list[dict], change, what: str) -> None:
    errors = []
    for base in bases:
        values = deepcopy({**DATA, **base}) if base else {}
        change(values)
        try:
            RunConfig.from_dict(values)
            return
        except ConfigError as error:
            errors.append(str(error))
    raise AssertionError(f"{what}:\n" + "\n".join(errors))


def _merge(values: dict, part: dict) -> None:
    for key, value in part.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            _merge(values[key], value)
        else:
            values[key] = value
