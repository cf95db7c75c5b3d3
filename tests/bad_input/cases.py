"""A case of bad input: the files and the command of a user, what the error must contain, and how a case is judged.

Every table module of this folder lists cases in `CASES`. Cases with `ok` are valid input that looks similar to the
invalid one: they must be accepted, so that the checks are not stricter than they have to be.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

LONGEST = 1500  # characters of an error
File = str | bytes | list | Callable[[Path], None]  # text, bytes, rows of JSON lines, or a function of the path

BASE: dict[str, Any] = {"base_model": "model", "rl": "ebft", "ebft": {"mode": "strided", "stride": 4,
                                                                      "context_length": 4, "generate_max_len": 4,
                                                                      "n_samples_per_prompt": 2, "use_whitening": True},
                        "datasets": [{"path": "rows.jsonl", "type": "ebft_pretrain.transform"}], "sequence_len": 64,
                        "max_steps": 1, "learning_rate": 1e-4, "output_dir": "out", "save_strategy": "no"}  # fmt: skip
GRPO = {"rl": "grpo", "ebft": None, "datasets": [{"path": "pairs.jsonl", "type": "ebft_opencode.transform"}],
        "micro_batch_size": 2, "chat_template": "chatml",
        "trl": {"num_generations": 2, "max_completion_length": 4, "reward_funcs": ["my_rewards.score"]}}  # fmt: skip
TEXT = "def add(first, second):\n    return first + second\n\nprint(add(1, 2))\n"
ROWS = [{"text": TEXT * 2}] * 4
PAIRS = [{"input": f"Add {n} and {n}.", "output": f"The sum is {2 * n}."} for n in range(4)]


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


@dataclass
class Outcome:
    code: int
    output: str  # stderr
    exception: str = ""  # the last line of a traceback
    trained: bool = False  # whether the command got as far as training


def bad(name: str, *expect: str, **rest: Any) -> Case:
    return Case(name, expect, **rest)


def good(name: str, **rest: Any) -> Case:
    return Case(name, ok=True, **rest)


def entry(**changes: Any) -> dict[str, Any]:
    """Changes of a config with one dataset entry with these keys."""
    found = {"path": "rows.jsonl", "type": "ebft_pretrain.transform"} | changes
    return {"datasets": [{key: value for key, value in found.items() if value is not None}]}


def prepare(case: Case, folder: Path, model: Path) -> None:
    """Write the files of a case to `folder`, with the model under the name `model`."""
    if case.model is None:
        (folder / "model").symlink_to(model)
    else:
        shutil.copytree(model, folder / "model")
        case.model(folder / "model")
    defaults = {"rows.jsonl": ROWS, "pairs.jsonl": PAIRS, "run.yaml": _config(case.config)}
    for name, content in {**defaults, **case.files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(path)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, list):
            path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
        else:
            path.write_text(content, encoding="utf-8")


def _config(changes: Mapping[str, Any] | str) -> str:
    if isinstance(changes, str):
        return changes
    values = copy.deepcopy(BASE)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(values.get(key), dict)
        values[key] = {**values[key], **value} if both else value
        if value is None:
            del values[key]
    return json.dumps(values, indent=1)  # JSON is YAML


def invoke(case: Case, folder: Path) -> Outcome:
    """Run the command of a case in this process; training is replaced with an exception unless the case `trains`."""
    from ebft.tools.cli import app

    runner = CliRunner(env={"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200", "HOME": str(folder)})
    with chdir(folder), _without_training(case.trains) as reached, _own_imports(folder), _warnings():
        result = runner.invoke(app, case.command.split())
    trained = bool(reached) or (case.trains and result.exit_code == 0)
    crashed = result.exception is not None and not isinstance(result.exception, SystemExit)
    said = f"{type(result.exception).__name__}: {result.exception}" if crashed else ""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.stderr)
    return Outcome(result.exit_code, plain, said, trained)


def complaint(case: Case, outcome: Outcome, folder: Path) -> str | None:
    """What is wrong with the outcome of a case, beginning with its kind; None if nothing is."""
    changed = [name for name in case.unchanged if not (folder / name).exists()]
    made = [name for name in case.absent if (folder / name).exists() or (folder / name).is_symlink()]
    if changed or made:
        return f"lost: {changed} are gone, {made} were made"
    if case.ok:
        return _refused(case, outcome)
    if outcome.exception:
        return f"traceback: {outcome.exception[:300]}"
    if outcome.code == 0 or outcome.trained:
        return f"silent: accepted: {outcome.output[-300:]}"
    errors = re.findall(r"(?ms)^Error(?:: | while ).*?(?=^(?:Error: |Error while |Warning: )|\Z)", outcome.output)
    if "Traceback (most recent" in outcome.output:
        return f"traceback: {outcome.output[-300:]}"
    if len(errors) != 1 and "Usage:" not in outcome.output:
        return f"unclear: {len(errors)} errors: {outcome.output[-300:]}"
    said = errors[-1].strip() if errors else outcome.output
    if len(said) > LONGEST:
        return f"long: {len(said)} characters: {said[:300]}"
    named = not case.expect or any(part.lower() in said.lower() for part in case.expect)  # words are of libraries
    return None if named else f"unclear: without any of {case.expect}: {said}"


def _refused(case: Case, outcome: Outcome) -> str | None:
    accepted = outcome.trained if case.command.startswith("train") else outcome.code == 0
    if not accepted:
        return f"refused: {outcome.exception or outcome.output[-600:]}"
    missing = [part for part in case.warns if part.lower() not in outcome.output.lower()]
    return f"unclear: without {missing}: {outcome.output[-600:]}" if missing else None


@contextmanager
def _without_training(trains: bool) -> Iterator[list]:
    """Stop before the first step, as with Ctrl-C, unless `trains`; yields a list that is then no longer empty."""
    from ebft.run import training

    reached: list[bool] = []

    def stop(*_: Any) -> None:
        reached.append(True)
        raise KeyboardInterrupt("Stopped before training.")

    before = training.train_steps
    training.train_steps = before if trains else stop
    try:
        yield reached
    finally:
        training.train_steps = before


@contextmanager
def _warnings() -> Iterator[None]:
    """Print warnings as the command does."""
    from ebft.tools.console import show_warnings

    with warnings.catch_warnings():
        show_warnings()
        yield


@contextmanager
def _own_imports(folder: Path) -> Iterator[None]:
    """Forget the modules that a case imports from its folder, as a new process would."""
    paths, modules = list(sys.path), set(sys.modules)
    # The folder of an earlier case is not searched: the command adds its working directory itself.
    sys.path[:] = [path for path in sys.path if not path.startswith(os.path.dirname(folder))]
    try:
        yield
    finally:
        sys.path[:] = paths
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(str(folder)):
                del sys.modules[name]
