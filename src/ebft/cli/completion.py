"""Completion in the shell: config files, config keys and their values, and names. Nothing here imports torch."""

import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import typer

from ebft.config.reference import choices_of, option_groups
from ebft.dashboard.rollouts import TERMS, all_samples
from ebft.fetch.catalog import MODELS, is_gguf

COPIED = ("examples", "deepspeed_configs")
_SAMPLES_READ = 50  # of a log of rollouts, for the names of its terms
_CONFIGS = (".yaml", ".yml")


def complete_config(incomplete: str) -> list[str]:
    """Config files and folders; the content of a folder if nothing else begins with `incomplete`."""
    return _paths(incomplete, _CONFIGS)


def complete_folder(incomplete: str) -> list[str]:
    """Folders."""
    return _paths(incomplete, ())


def complete_model(incomplete: str) -> list[str]:
    """Folders, and names of models of `ebft fetch`."""
    return [*(name for name in MODELS if name.startswith(incomplete)), *complete_folder(incomplete)]


def complete_fetched(incomplete: str) -> list[str]:
    """What `ebft fetch` takes: names of models, of copies of configs, and GGUF files."""
    names = [name for name in (*MODELS, *COPIED) if name.startswith(incomplete)]
    return names or [path for path in _paths(incomplete, (".gguf",)) if path.endswith("/") or is_gguf(path)]


def complete_term(ctx: typer.Context, incomplete: str) -> list[str]:
    """Terms of rewards in the run whose folder is given, or those of all runs."""
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
    if equals:
        return _assignments(key)
    keys = list(_keys(incomplete))
    if len(keys) == 1 and choices_of(keys[0]):
        return _assignments(keys[0])
    return [f"{key}=" for key in keys]


def complete_word(ctx: typer.Context, incomplete: str) -> list[str]:
    """For `ebft config`: overrides with --check, otherwise keys to search for."""
    if ctx.params.get("check") is not None:
        return complete_override(ctx, incomplete)
    return list(_keys(incomplete))


def _assignments(key: str) -> list[str]:
    return [f"{key}={value}" for value in choices_of(key)]


def _keys(incomplete: str) -> Iterator[str]:
    """The keys that begin with `incomplete`; elements of lists have the number in it, or 0."""
    number = re.search(r"\.(\d+)(\.|$)", incomplete)
    for options in option_groups().values():
        for option in options:
            key = option.key.replace(".N.", f".{number[1] if number else 0}.")
            if key.startswith(incomplete) and (key == option.key or "." in incomplete):
                yield key


def _paths(incomplete: str, suffixes: tuple[str, ...]) -> list[str]:
    """Folders, with a slash at their end, and files with these suffixes, that begin with `incomplete`."""
    head, tail = os.path.split(incomplete)
    try:
        entries = sorted(os.scandir(Path(head or ".").expanduser()), key=lambda entry: entry.name)
    except OSError:
        return []
    shown = [entry for entry in entries if entry.name.startswith(tail or "") and (tail or entry.name[0] != ".")]
    found = [
        os.path.join(head, entry.name) + ("/" if entry.is_dir() else "")
        for entry in shown
        if entry.is_dir() or entry.name.lower().endswith(suffixes or ("/",))
    ]
    if len(found) == 1 and found[0].endswith("/"):  # the shell would add a space after the only word
        inside = _paths(found[0], suffixes)
        return [*found, *inside] if not suffixes else inside or found
    return found
