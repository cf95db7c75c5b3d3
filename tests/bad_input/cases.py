"""A case of bad input: the files and the command of a user, and what the error must contain."""
# Cases with `ok` look similar and must be accepted, so that the checks are not stricter than they have to be.

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

File = str | bytes | list | Callable[[Path], None]  # text, bytes, rows of JSON lines, or a function of the path

BASE: dict[str, Any] = {"base_model": "model", "rl": "ebft", "ebft": {"mode": "strided", "stride": 4,
                                                                      "context_length": 4, "generate_max_len": 4,
                                                                      "n_samples_per_prompt": 2, "use_whitening": True},
                        "datasets": [{"path": "rows.jsonl", "type": "ebft_pretrain.transform"}], "sequence_len": 64,
                        "max_steps": 1, "learning_rate": 1e-4, "output_dir": "out", "save_strategy": "no"}  # fmt: skip
TEXT = "def add(first, second):\n    return first + second\n\nprint(add(1, 2))\n"
ROWS = [{"text": TEXT * 2}] * 4


@dataclass(frozen=True)
class Case:
    """Files and a command; `expect` are fragments of the error, one of which must be in it."""

    name: str
    expect: tuple[str, ...] = ()
    config: Mapping[str, Any] | str = field(default_factory=dict)  # changes of BASE, or the whole file
    files: Mapping[str, File] = field(default_factory=dict)
    command: str = "train run.yaml"
    ok: bool = False
    warns: tuple[str, ...] = ()  # fragments of warnings of a valid case
    model: Callable[[Path], None] | None = None  # changes the copy of the model
    trains: bool = False  # whether the first training step is run; all other cases stop before it
    unchanged: tuple[str, ...] = ()  # files that must exist afterwards as before
    absent: tuple[str, ...] = ()  # paths that must not exist afterwards


def bad(name: str, *expect: str, **rest: Any) -> Case:
    return Case(name, expect, **rest)


def good(name: str, **rest: Any) -> Case:
    return Case(name, ok=True, **rest)


def entry(**changes: Any) -> dict[str, Any]:
    """Changes of a config with one dataset entry with these keys."""
    found = {"path": "rows.jsonl", "type": "ebft_pretrain.transform"} | changes
    return {"datasets": [{key: value for key, value in found.items() if value is not None}]}
