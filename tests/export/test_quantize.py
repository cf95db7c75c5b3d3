"""Quantised models are saved in safetensors format, load with from_pretrained, and their perplexity is measured."""

import math
import re
import resource

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from ebft.errors import DataError, ModelError
from ebft.tools.export.quantize import quantize_model, text_sequences, torchao_settings
from tests.export.models import save_adapter

TEXT = "def add(x, y):\n    return x + y\n" * 40


def flat(text):
    return " ".join(text.split())


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def perplexity(model, tokenizer):
    ids = torch.tensor(tokenizer(TEXT)["input_ids"][:101])[None]
    with torch.no_grad():
        return math.exp(F.cross_entropy(model(ids).logits[0, :-1].float(), ids[0, 1:]))


def test_int8(tiny_llama_dir, text, ebft, tmp_path):
    to = tmp_path / "int8"
    result = ebft("quantize", tiny_llama_dir, "--output", to, "--text", text, "--max-tokens", "101")
    assert result.exit_code == 0, result.output
    tokenizer = AutoTokenizer.from_pretrained(to)
    before, after = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (tiny_llama_dir, to))
    assert type(after.model.layers[0].mlp.up_proj.weight).__name__ == "Int8Tensor"
    expected = [perplexity(model, tokenizer) for model in (before, after)]
    shown = re.search(r"Perplexity of 100 predicted tokens: (\S+) before, (\S+) after", flat(result.output))
    assert [float(value) for value in shown.groups()] == pytest.approx(expected, rel=5e-6)
    assert abs(expected[0] - expected[1]) > 1e-5 * expected[0] and expected[1] == pytest.approx(expected[0], rel=0.01)
    stored = load_file(to / "model.safetensors")
    assert any(weight.dtype == torch.int8 for weight in stored.values()) and not list(to.glob("*.bin"))
    assert (to / "model.safetensors").stat().st_mode & 0o777 == to.stat().st_mode & 0o666
    again = ebft("quantize", tiny_llama_dir, "--output", to, "--text", text)
    assert again.exit_code == 2 and "is not empty" in flat(again.output)


def test_folders_that_are_links_or_left_by_a_failure(tiny_llama_dir, text, tmp_path, monkeypatch):
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    sequences = lambda tokenizer: text_sequences(text, tokenizer, 101)
    result = quantize_model(tiny_llama_dir, link, "int8", sequences)
    assert result.folder == link and link.is_symlink() and (folder / "model.safetensors").is_file()
    perplexities, before = iter([1.0]), sorted(tmp_path.iterdir())
    monkeypatch.setattr("ebft.tools.export.quantize.perplexity", lambda model, scored: next(perplexities))
    with pytest.raises(StopIteration):
        quantize_model(tiny_llama_dir, tmp_path / "new", "int8", sequences)
    assert sorted(tmp_path.iterdir()) == before


def test_a_full_disk_is_an_error_of_one_line_and_leaves_nothing(tiny_llama_dir, text, ebft, tmp_path):
    """The limit on the size of a file of this process stands for the full disk."""
    before = sorted(tmp_path.iterdir())
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, previous[1]))
    try:
        failed = ebft("quantize", tiny_llama_dir, "--output", tmp_path / "to", "--text", text)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)
    assert failed.exit_code == 2 and f"Cannot write to {tmp_path}" in flat(failed.output), failed.output
    assert sorted(tmp_path.iterdir()) == before


def test_the_held_out_data_of_a_config(tiny_llama_dir, text, ebft, tmp_path):
    config = {"base_model": str(tiny_llama_dir), "output_dir": str(tiny_llama_dir), "sequence_len": 64, "rl": "ebft"}
    config["ebft"] = {"mode": "strided", "context_length": 8, "stride": 8, "generate_max_len": 8}
    config["datasets"] = config["test_datasets"] = [{"path": str(text), "type": "ebft_pretrain.transform"}]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    result = ebft("quantize", path, "--output", tmp_path / "int8")
    assert result.exit_code == 0 and "Perplexity of" in result.output, result.output


def test_int4_is_refused_where_it_does_not_run(tiny_llama_dir, text, ebft, tmp_path):
    result = ebft("quantize", tiny_llama_dir, "--output", tmp_path / "int4", "--type", "int4", "--text", text)
    if torch.cuda.is_available():
        pytest.skip("int4 may run here")
    assert result.exit_code == 2 and "--type int4 does not run on cpu" in flat(result.output)
    assert not (tmp_path / "int4").exists()


def test_errors(tiny_llama_dir, text, ebft, tmp_path, monkeypatch):
    adapter = save_adapter(tmp_path / "adapter", tiny_llama_dir, target_modules=["q_proj"])
    to = tmp_path / "to"
    with pytest.raises(ModelError, match="Merge it first .ebft merge-lora"):
        quantize_model(adapter, to, "int8", lambda tokenizer: [])
    with pytest.raises(ModelError, match="no config.json"):
        quantize_model(tmp_path, to, "int8", lambda tokenizer: [])
    again = tmp_path / "quantised"
    again.mkdir()
    (again / "config.json").write_text('{"quantization_config": {"quant_method": "torchao"}}')
    with pytest.raises(ModelError, match="quantised is already quantised .torchao."):
        quantize_model(again, to, "int8", lambda tokenizer: [])
    with pytest.raises(ModelError, match="--type: invalid value 'int2'"):
        torchao_settings("int2", torch.device("cpu"))
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(DataError, match="fewer than two tokens"):
        text_sequences(empty, AutoTokenizer.from_pretrained(tiny_llama_dir), 100)
    assert "Give a text" in flat(ebft("quantize", tiny_llama_dir, "--output", to).output)
    assert "--output DIR is required" in flat(ebft("quantize", tiny_llama_dir, "--text", text).output)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="requires the package torchao"):
        torchao_settings("int8", torch.device("cpu"))
