"""`ebft merge-lora` from a config and from a folder, and `ebft merge-sharded`."""

import importlib.util
import json

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.conftest import plain
from tests.export.models import save_adapter, with_adapter
from tests.export.test_sharded import parts  # noqa: F401  a fixture


@pytest.fixture
def run(tiny_llama_dir, tmp_path):
    """The config of a run with a trained adapter in its output folder."""
    output = tmp_path / "output"
    save_adapter(output, tiny_llama_dir, target_modules=["q_proj"])
    AutoTokenizer.from_pretrained(tiny_llama_dir).save_pretrained(output)
    config = {"base_model": str(tiny_llama_dir), "adapter": "lora", "lora_r": 4, "lora_alpha": 8}
    config |= {"lora_target_modules": ["q_proj"], "sequence_len": 64, "rl": "ebft", "ebft": {"mode": "strided"}}
    config |= {"datasets": [{"path": "unused", "type": "completion"}], "output_dir": str(output)}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return tmp_path / "run.yaml"


def assert_merged(folder, base, adapter):
    merged = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    expected = with_adapter(base, adapter).merge_and_unload().state_dict()
    assert all(torch.equal(merged[name], expected[name]) for name in expected)


@pytest.mark.parametrize("from_folder", [False, True], ids=["config", "folder"])
def test_an_adapter_is_merged(run, from_folder, ebft, refused, tiny_llama_dir):
    output = run.parent / "output"
    result = ebft("merge-lora", output if from_folder else run)
    assert result.exit_code == 0 and "1 shard," in result.output and "Peak memory" in result.output, result.output
    assert str(output / "merged") in result.output.replace("\n", "")
    assert_merged(output / "merged", tiny_llama_dir, output)
    assert "is not empty" in refused("merge-lora", run)


def test_another_adapter_and_folder(run, ebft, tiny_llama_dir, tmp_path):
    other = save_adapter(tmp_path / "other", tiny_llama_dir, target_modules=["v_proj"])
    arguments = ("--lora-model-dir", other, "--output", tmp_path / "to", "--max-shard-size", "50KB")
    result = ebft("merge-lora", run, *arguments)
    assert result.exit_code == 0, result.output
    assert_merged(tmp_path / "to", tiny_llama_dir, other)
    assert (tmp_path / "to" / "model.safetensors.index.json").is_file()


def test_errors(run, refused, tiny_llama_dir, tmp_path, monkeypatch):
    output, find = tmp_path / "output", importlib.util.find_spec
    for arguments, message in (
        ([tmp_path], "does not contain an adapter"),
        ([tiny_llama_dir], "contains a full model, which needs no merging. Use the folder as it is."),
        ([output, "--base-model", tmp_path / "absent"], "does not exist"),
    ):  # fmt: skip
        assert message in refused("merge-lora", *arguments)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name == "bitsandbytes" else find(name, *_))
    said = refused("merge-lora", run, "adapter=qlora", "load_in_4bit=true")
    assert "requires the package bitsandbytes" in said and not (output / "merged").exists()
    (output / "checkpoint-2").mkdir()
    (output / "checkpoint-2" / "ebft_run.json").write_text(json.dumps({"adapter": "qlora"}))
    assert "Give the config of the run" in refused("merge-lora", output)


def test_parts_of_a_sharded_model_are_merged(ebft, refused, parts, tmp_path):  # noqa: F811
    result = ebft("merge-sharded", parts, "--output", tmp_path / "merged")
    assert result.exit_code == 0, result.output
    assert f"Merged model saved in {tmp_path / 'merged'}" in result.stdout and "21 weights" in result.stdout
    assert "is a pickle file" in plain(result.stderr)
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    for arguments in ([tmp_path], [parts, "--output", tmp_path / "merged"], [parts, "--max-shard-size", "many"]):
        assert refused("merge-sharded", *arguments).startswith("Error: ")
