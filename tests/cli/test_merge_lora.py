"""`ebft merge-lora` from a config and from a folder, and `ebft merge-sharded`."""

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.conftest import flat, plain
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


@pytest.mark.parametrize("from_folder", [False, True], ids=["config", "folder"])
def test_an_adapter_is_merged(run, from_folder, ebft, refused, tiny_llama_dir):
    output = run.parent / "output"
    result = ebft("merge-lora", output if from_folder else run)
    assert result.exit_code == 0 and "1 shard," in result.output and "Peak memory" in result.output, result.output
    assert str(output / "merged") in result.output.replace("\n", "")
    merged = AutoModelForCausalLM.from_pretrained(output / "merged").state_dict()
    expected = with_adapter(tiny_llama_dir, output).merge_and_unload().state_dict()
    assert all(torch.equal(merged[name], expected[name]) for name in expected)
    assert "is not empty" in refused("merge-lora", run)
    assert f"Can't find 'adapter_config.json' at '{tiny_llama_dir}'" in flat(ebft("merge-lora", tiny_llama_dir).stderr)


def test_parts_of_a_sharded_model_are_merged(ebft, parts, tmp_path):  # noqa: F811
    result = ebft("merge-sharded", parts, "--output", tmp_path / "merged")
    assert result.exit_code == 0, result.output
    assert f"Merged model saved in {tmp_path / 'merged'}" in result.stdout and "21 weights" in result.stdout
    assert "is a pickle file" in plain(result.stderr)
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    failed = ebft("merge-sharded", parts, "--max-shard-size", "many")
    assert failed.exit_code == 1 and "'many'" in failed.stderr and not (parts / "merged").exists()
