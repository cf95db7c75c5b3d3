"""`ebft fetch` as a user runs it."""

import json
import shlex

import pytest

from ebft.methods.base_config import deepspeed_settings
from tests.fetch.test_convert import tiny_model  # noqa: F401  a fixture


def test_a_model_is_fetched_once_listed_and_named_in_configs(ebft, refused, tiny_model, write_config):  # noqa: F811
    folder, config = tiny_model.cache / "models" / "tiny-1.0", write_config("strided")
    before, asked = ebft("fetch").stdout, ["base_model=tiny", "evaluation.max_new_tokens=4"]
    assert "tiny: a model for tests (not fetched)" in before and "smollm2-135m: " in before and "examples: " in before
    assert "Run `ebft fetch tiny` first" in refused("evaluate", config, *asked)
    first, second = ebft("fetch", "tiny"), ebft("fetch", "tiny")
    assert first.exit_code == second.exit_code == 0, first.stderr
    assert first.stdout == second.stdout == f"{folder}\n"
    assert "Downloading tinymodel 1.0" in first.stderr and second.stderr == ""
    assert f"tiny: a model for tests (fetched: {folder})" in ebft("fetch").stdout
    result = ebft("evaluate", config, *asked, "--model", "tiny")
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("place", [["mine"], ["--to", "mine"]])
def test_examples_go_where_they_are_wanted(ebft, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ebft("fetch", "examples").stdout == "examples\n"
    copied = ebft("fetch", "examples", *place)
    assert copied.stdout == "mine\n"
    fetch, train = [shlex.split(line) for line in copied.stderr.splitlines()[1:]]
    assert fetch == ["ebft", "fetch", "smollm2-135m"] and train[:3] == ["ebft", "train", "mine/strided_text_lora.yaml"]
    result = ebft("config", "--check", *train[2:])
    assert result.exit_code == 0 and "smollm2-135m" in result.output, result.output
    (tmp_path / "mine" / "verifier.py").write_text("mine")
    assert ebft("fetch", "examples", *place).exit_code == 2
    assert ebft("fetch", "examples", *place, "--force").exit_code == 0


def test_deepspeed_configs_are_those_that_names_select(ebft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ebft("fetch", "deepspeed_configs").stdout == "deepspeed_configs\n"
    copied = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "deepspeed_configs").iterdir()}
    assert {"zero1", "zero2", "zero3", "zero3_bf16_cpuoffload_all"} < copied.keys()
    for name, content in copied.items():
        assert deepspeed_settings(name) == deepspeed_settings(f"deepspeed_configs/{name}.json") == content
        assert content["zero_optimization"]["stage"] == int(name[4])
