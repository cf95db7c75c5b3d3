"""Every case of bad input gives one clear error, and every valid case is accepted."""

import copy
import json
import re
import shutil
import sys
import warnings
from collections.abc import Mapping
from typing import NamedTuple

import pytest
import torch
from typer.testing import CliRunner

from ebft.tools import cli, console
from tests.bad_input import data_files, models, runs
from tests.bad_input.cases import BASE, ROWS, bad, good

CASES = [*data_files.CASES, *models.CASES, *runs.CASES]
LONGEST = 1500  # characters of an error


class Outcome(NamedTuple):
    code: int
    output: str  # stderr
    exception: str  # the last line of a traceback
    trained: bool  # whether the command got as far as training


def prepare(case, folder, model):
    """Write the files of a case to `folder`, with the model under the name `model`."""
    if case.model is None:
        (folder / "model").symlink_to(model)
    else:
        shutil.copytree(model, folder / "model")
        case.model(folder / "model")
    for name, content in {"rows.jsonl": ROWS, "run.yaml": config_of(case), **case.files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(path)
        else:
            lines = content if isinstance(content, str | bytes) else "".join(json.dumps(row) + "\n" for row in content)
            path.write_bytes(lines if isinstance(lines, bytes) else lines.encode())


def config_of(case):
    """The text of the config: JSON is YAML."""
    if isinstance(case.config, str):
        return case.config
    values = copy.deepcopy(BASE)
    for key, value in case.config.items():
        both = isinstance(value, Mapping) and isinstance(values.get(key), dict)
        values[key] = {**values[key], **value} if both else value
    return json.dumps({key: value for key, value in values.items() if value is not None}, indent=1)


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """`invoke(case)`: run its command in this process; it is stopped before the first step unless the case `trains`."""

    def run(case):
        reached = []

        def stop(*_):
            reached.append(True)
            raise KeyboardInterrupt("Stopped before training.")

        if not case.trains:
            monkeypatch.setattr("ebft.run.training.train_steps", stop)
        monkeypatch.chdir(tmp_path)
        # The folder of an earlier case is not searched: the command adds its working directory itself.
        monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.startswith(str(tmp_path.parent))])
        sys.modules.pop("own", None)
        runner = CliRunner(env={"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200", "HOME": str(tmp_path)})
        with warnings.catch_warnings():
            console.show_warnings()
            result = runner.invoke(cli.app, case.command.split())
        crashed = result.exception is not None and not isinstance(result.exception, SystemExit)
        said = f"{type(result.exception).__name__}: {result.exception}" if crashed else ""
        plain = re.sub(r"\x1b\[[0-9;]*m", "", result.stderr)
        return Outcome(result.exit_code, plain, said, bool(reached) or (case.trains and result.exit_code == 0))

    return run


def complaint(case, outcome, folder):
    """What is wrong with the outcome of a case, beginning with its kind; None if nothing is."""
    changed = [name for name in case.unchanged if not (folder / name).exists()]
    made = [name for name in case.absent if (folder / name).exists() or (folder / name).is_symlink()]
    if changed or made:
        return f"lost: {changed} are gone, {made} were made"
    if case.ok:
        missing = [part for part in case.warns if part.lower() not in outcome.output.lower()]
        if not (outcome.trained if case.command.startswith("train") else outcome.code == 0):
            return f"refused: {outcome.exception or outcome.output[-600:]}"
        return f"unclear: without {missing}: {outcome.output[-600:]}" if missing else None
    if outcome.exception or "Traceback (most recent" in outcome.output:
        return f"traceback: {outcome.exception[:300]} {outcome.output[-300:]}"
    if outcome.code == 0 or outcome.trained:
        return f"silent: accepted: {outcome.output[-300:]}"
    errors = re.findall(r"(?ms)^Error(?:: | while ).*?(?=^(?:Error: |Error while |Warning: )|\Z)", outcome.output)
    if len(errors) != 1 and "Usage:" not in outcome.output:
        return f"unclear: {len(errors)} errors: {outcome.output[-300:]}"
    said = errors[-1].strip() if errors else outcome.output
    if len(said) > LONGEST:
        return f"long: {len(said)} characters: {said[:300]}"
    named = not case.expect or any(part.lower() in said.lower() for part in case.expect)  # words are of libraries
    return None if named else f"unclear: without any of {case.expect}: {said}"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case(case, invoke, tmp_path, tiny_llama_dir, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    prepare(case, tmp_path, tiny_llama_dir)
    assert complaint(case, invoke(case), tmp_path) is None


def test_a_pickle_in_a_checkpoint_is_not_run(invoke, tmp_path, tiny_llama_dir):
    first = good("first", config={"save_strategy": "steps", "save_steps": 1}, trains=True)
    prepare(first, tmp_path, tiny_llama_dir)
    assert invoke(first).trained
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        shutil.copytree(tmp_path / "out" / "checkpoint-1", tmp_path / name)
        torch.save({"state": models.Evil(str(tmp_path / "pwned"))}, tmp_path / name / name)
        again = bad("again", command=f"train run.yaml max_steps=2 resume_from_checkpoint={name}", trains=True)
        assert invoke(again).code != 0, name
        assert not (tmp_path / "pwned").exists()
