"""`ebft merge-lora` from a config and from a folder."""

import importlib.util
import json

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.conftest import plain
from tests.export.models import save_adapter, with_adapter


@pytest.fixture
def run(tiny_llama_dir, tmp_path):
    """The config of a run with a trained adapter in its output folder."""
    output = tmp_path / "output"
    save_adapter(output, tiny_llama_dir, target_modules=["q_proj"])
    AutoTokenizer.from_pretrained(tiny_llama_dir).save_pretrained(output)
    config = {
        "base_model": str(tiny_llama_dir),
        "adapter": "lora",
        "lora_r": 4,
        "lora_alpha": 8,
        "lora_target_modules": ["q_proj"],
        "sequence_len": 64,
        "rl": "ebft",
        "ebft": {"mode": "strided"},
        "datasets": [{"path": "unused", "type": "completion"}],
        "output_dir": str(output),
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize("from_folder", [False, True], ids=["config", "folder"])
def test_an_adapter_is_merged(run, from_folder, ebft, tiny_llama_dir):
    output = run.parent / "output"
    result = ebft("merge-lora", output if from_folder else run)
    assert result.exit_code == 0, result.output
    assert "1 shard," in result.output and "Peak memory" in result.output
    assert str(output / "merged") in result.output.replace("\n", "")
    merged = AutoModelForCausalLM.from_pretrained(output / "merged").state_dict()
    expected = with_adapter(tiny_llama_dir, output).merge_and_unload().state_dict()
    assert all(torch.equal(merged[name], expected[name]) for name in expected)
    again = ebft("merge-lora", run)
    assert again.exit_code == 2 and "is not empty" in plain(again.output)


def test_another_adapter_and_folder(run, ebft, tiny_llama_dir, tmp_path):
    other = save_adapter(tmp_path / "other", tiny_llama_dir, target_modules=["v_proj"])
    arguments = ("--lora-model-dir", other, "--output", tmp_path / "to", "--max-shard-size", "50KB")
    result = ebft("merge-lora", run, *arguments)
    assert result.exit_code == 0, result.output
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "to").state_dict()
    expected = with_adapter(tiny_llama_dir, other).merge_and_unload().state_dict()
    assert all(torch.equal(merged[name], expected[name]) for name in expected)
    assert (tmp_path / "to" / "model.safetensors.index.json").is_file()


def test_errors(run, ebft, tmp_path):
    assert "is a folder: overrides" in ebft("merge-lora", tmp_path, "seed=1").output
    assert "does not contain an adapter" in ebft("merge-lora", tmp_path).output
    result = ebft("merge-lora", run, "adapter=", "lora_r=", "lora_alpha=", "lora_target_modules=")
    assert result.exit_code == 2 and "full model, which needs no merging" in result.output.replace("\n", " ")
    assert "--lora-model-dir requires a config" in ebft("merge-lora", tmp_path, "--lora-model-dir", "a").output
    assert "Cannot read config file" in ebft("merge-lora", tmp_path / "absent.yaml").output
    assert "neither a config file nor a folder" in ebft("merge-lora", tmp_path / "absent").output
    result = ebft("merge-lora", tmp_path / "output", "--base-model", tmp_path / "absent")
    assert result.exit_code == 2 and "does not exist" in result.output


def test_the_folder_of_an_adapter_on_quantised_weights_requires_its_config(run, ebft, tmp_path):
    (tmp_path / "output" / "checkpoint-2").mkdir()
    (tmp_path / "output" / "checkpoint-2" / "ebft_run.json").write_text(json.dumps({"adapter": "qlora"}))
    result = ebft("merge-lora", tmp_path / "output")
    assert result.exit_code == 2 and "Give the config of the run" in result.output.replace("\n", " ")


def test_after_training_on_quantised_weights_bitsandbytes_is_required(run, ebft, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name == "bitsandbytes" else find(name, *_))
    result = ebft("merge-lora", run, "adapter=qlora", "load_in_4bit=true")
    assert result.exit_code == 2 and "requires the package bitsandbytes" in " ".join(result.output.split())
    assert not (run.parent / "output" / "merged").exists()
