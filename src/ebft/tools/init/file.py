"""The file of a new config: its keys by group, each with a comment, and the rules for existing files."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from ruamel.yaml.error import YAMLError

from ebft.config.load import parse_yaml
from ebft.errors import doing
from ebft.files import write_text
from ebft.run.checks import check_runnable
from ebft.run.config.reference import option_groups
from ebft.run.config.schema import GROUPS, RunConfig
from ebft.tools.init.fit import Draft

_WIDTH = 118
_FIRST = ("Model", "Data", "Method", "Adapter")  # groups at the beginning of a file
_HEADING = """\
# Written by `{command}`.
# Paths are relative to the folder in which ebft is started. `ebft config` describes all keys.
"""


def written_by(command: Sequence[str]) -> str:
    """The line of a file that says which command wrote it."""
    return _heading(command).partition("\n")[0]


def render(draft: Draft, command: Sequence[str]) -> str:
    """The draft as commented YAML, which is checked as `ebft config --check` does. Raises ConfigError."""
    described = {option.key: option.description for options in option_groups().values() for option in options}
    first = {key: text.replace("`", "").partition(". ")[0].rstrip(".") for key, text in described.items()}
    comments = first | draft.comments
    comments |= {
        key: "" for key in ("base_model", "datasets.N.path", "test_datasets.N.path") if key not in draft.comments
    }
    left, lines = dict(draft.values), [_heading(command)]
    titles = [*_FIRST, *(title for title in GROUPS if title not in _FIRST)]
    for title in titles:
        part = {key: left.pop(key) for key in GROUPS[title].model_fields if key in left}
        if part:
            lines += [f"# {title}", *_mapping(part, comments, ""), ""]
    lines += _mapping(left, comments, "")  # of plugins, if overrides set any
    text = "\n".join(lines).rstrip() + "\n"
    check_runnable(RunConfig.from_dict(parse_yaml(text)), elsewhere=True)
    return text


def _heading(command: Sequence[str]) -> str:
    return _HEADING.format(command=_in_one_line(shlex.join(command)))


def _in_one_line(text: str) -> str:
    """Text of a comment: a line break in it, such as in a path, would end the comment."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def write(path: Path, text: str) -> None:
    """Write the file."""
    with doing(f"writing {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)


def _mapping(values: dict[str, Any], comments: dict[str, str], indent: str, path: str = "") -> Iterator[str]:
    """The lines of a mapping; `path` is the dotted key of it, with a dot at its end."""
    for key, value in values.items():
        name = f"{path}{key}"
        comment = comments.get(name, "")
        if isinstance(value, dict) and value:
            yield from _commented(f"{indent}{key}:", comment, indent)
            yield from _mapping(value, comments, indent + "  ", name + ".")
        elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            yield from _commented(f"{indent}{key}:", comment, indent)
            for each in value:
                inner = list(_mapping(each, comments, indent + "    ", f"{name}.N."))
                first = next(number for number, line in enumerate(inner) if not line.lstrip().startswith("#"))
                yield from (line[2:] for line in inner[:first])
                yield f"{indent}  - {inner[first].lstrip()}"
                yield from inner[first + 1 :]
        else:
            yield from _commented(f"{indent}{key}: {_scalar(value)}", comment, indent)


def _commented(line: str, comment: str, indent: str) -> Iterator[str]:
    """A line with its comment beside it, or above it if it is long."""
    comment = _in_one_line(comment)
    if not comment:
        yield line
    elif len(line) + len(comment) + 3 <= _WIDTH:
        yield f"{line} # {comment}"
    else:
        yield from (f"{indent}# {part}" for part in wrap(comment, _WIDTH - len(indent) - 2))
        yield line


def _scalar(value: Any) -> str:
    """A value as it is written in YAML: plain if it is read as itself."""
    if isinstance(value, float) and value != int(value):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    plain = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        is_same = "\n" not in plain and parse_yaml(f"key: {plain}") == {"key": value}
    except YAMLError:
        is_same = False
    return plain if is_same else json.dumps(value, ensure_ascii=False)
