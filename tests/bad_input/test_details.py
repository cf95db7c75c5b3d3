"""Details that a table of cases does not show: values that are kept, tracebacks on request, files that are not run."""

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

from ebft.config.keys.data import DatasetEntry
from ebft.data.sources import read_source
from ebft.run.config.schema import RunConfig
from ebft.tools.cli import app
from tests.bad_input.cases import bad, entry, good, invoke, prepare
from tests.bad_input.models import Evil


@pytest.fixture
def run(tmp_path, tiny_llama_dir, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def run_case(case):
        prepare(case, tmp_path, tiny_llama_dir)
        return invoke(case, tmp_path)

    return run_case


@pytest.mark.parametrize("text", ["2024-01-01", "2024-01-01T10:00:00Z", "2024-01-01 10:00:00", "1e5", "true", "010"])
def test_texts_that_look_like_other_values_stay_texts(text, tmp_path):
    row = {"text": text, "messages": [{"role": "user", "content": text}], "meta": {"when": text}}
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(3)))
    found = read_source(DatasetEntry(path=str(path), type="completion"))
    assert list(found) == [row] * 3


def test_every_key_with_a_default_may_be_empty_in_the_json_schema():
    schema = RunConfig.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        for name, key in section.get("properties", {}).items():
            accepts_null = {"type": "null"} in key.get("anyOf", [])
            assert accepts_null != (name in section.get("required", ())), name
    assert {"const": -1} in schema["properties"]["max_steps"]["anyOf"]
    assert RunConfig.from_dict({"base_model": "m", "datasets": [{"path": "d", "type": "completion"}], "max_steps": -1})


FAILING = """
def transform(cfg, **kwargs):
    return lambda example, tokenizer=None: example["body"], {"remove_columns": "__all__"}
"""


def test_errors_of_user_code_name_the_row_and_the_line(run, tmp_path):
    said = run(bad("raises", config=entry(type="own.transform"), files={"own.py": FAILING})).output
    assert f"row 0: KeyError: 'body' ({tmp_path}/own.py, line 3:" in said
    assert "has the columns text" in said and "Traceback" not in said


def test_check_says_which_modules_it_imported(run):
    case = good("own", config=entry(type="own.transform"), files={"own.py": FAILING}, command="config --check run.yaml")
    outcome = run(case)
    assert outcome.code == 0 and "ran their modules' code: own.transform" in outcome.printed
    text = CliRunner(env={"COLUMNS": "300", "TERM": "dumb"}).invoke(app, ["config", "--help"]).output
    assert "which runs their code" in " ".join(text.replace("│", " ").split())


def test_a_pickle_in_a_checkpoint_is_not_run(run, tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 1}
    assert run(good("first", config=saved, trains=True)).trained
    checkpoint = tmp_path / "out" / "checkpoint-1"
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        broken = tmp_path / "broken"
        shutil.copytree(checkpoint, broken)
        torch.save({"state": Evil(str(tmp_path / "pwned"))}, broken / name)
        again = bad("again", command="train run.yaml max_steps=2 resume_from_checkpoint=broken", trains=True)
        assert invoke(again, tmp_path).code != 0, name
        assert not (tmp_path / "pwned").exists()
        shutil.rmtree(broken)
