"""Quantised models are saved in safetensors format, load with from_pretrained, and their perplexity is measured."""

import math
import re
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from ebft.errors import ModelError
from ebft.methods.base_config import QuantizationSection
from ebft.tools.export.quantize import quantize_model, text_sequences
from tests.cli.conftest import flat
from tests.export.models import llama, save_adapter, save_base

TEXT = "def add(x, y):\n    return x + y\n" * 40


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
    assert "is not empty" in flat(ebft("quantize", tiny_llama_dir, "--output", to, "--text", text).output)


def test_the_held_out_data_of_a_config(tiny_llama_dir, text, ebft, tmp_path):
    config = {"base_model": str(tiny_llama_dir), "output_dir": str(shutil.copytree(tiny_llama_dir, tmp_path / "run"))}
    config |= {"sequence_len": 64, "rl": "ebft", "ebft": {"mode": "strided", "context_length": 8, "stride": 8}}
    config["datasets"] = config["test_datasets"] = [{"path": str(text), "type": "ebft_pretrain.transform"}]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    result = ebft("quantize", path)
    assert result.exit_code == 0 and "run/quantized" in flat(result.output), result.output
    config["quantization"] = {"weight_dtype": "int4", "activation_dtype": "int8", "group_size": 16}
    path.write_text(yaml.safe_dump(config))
    qat = ["rl=", "ebft=", "quantization=", "qat={weight_dtype: int4, activation_dtype: int8, group_size: 4}"]
    for name, options, size in (("section", [], 16), ("option", ["--group-size", "8"], 8), ("qat", qat, 4)):
        result = ebft("quantize", path, "--output", tmp_path / name, *options)
        assert result.exit_code == 0 and "after (int4)" in result.output, result.output
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert model.model.layers[0].mlp.up_proj.weight.block_size == [1, size]


BOTH = {"weight_dtype": "int4", "activation_dtype": "int8", "group_size": 8, "quantize_embedding": True}


@pytest.mark.parametrize(("settings", "is_right"), [
    ({"activation_dtype": "int8"}, lambda weight, _: weight.act_quant_kwargs is not None),
    ({"group_size": 16}, lambda weight, _: list(weight.block_size) == [1, 16]),
    ({"weight_dtype": "float8_e4m3fn"}, lambda weight, _: weight.qdata.dtype == torch.float8_e4m3fn),
    ({"weight_dtype": "ternary"}, lambda weight, _: len(weight[0].unique()) == 3),
    ({"quantize_embedding": True}, lambda _, it: (it.target_dtype, list(it.block_size)) == (torch.int8, [1, 32])),
    (BOTH, lambda _, it: (it.target_dtype, list(it.block_size)) == (torch.int4, [1, 8])),
])  # fmt: skip
def test_kinds_that_run_on_cpu(settings, is_right, tiny_llama_dir, text, tmp_path):
    """Each changes the perplexity of the written model a little."""
    to, sequences = tmp_path / "to", lambda tokenizer: text_sequences(text, tokenizer, 101)
    result = quantize_model(tiny_llama_dir, to, QuantizationSection(**settings), sequences)
    assert result.perplexity_after == pytest.approx(result.perplexity_before, rel=0.01)
    assert result.perplexity_after != result.perplexity_before
    model = AutoModelForCausalLM.from_pretrained(to)
    assert is_right(model.model.layers[0].mlp.up_proj.weight, model.model.embed_tokens.weight)
    assert type(model.lm_head.weight) is torch.nn.Parameter


def test_errors(tiny_llama_dir, tmp_path):
    adapter = save_adapter(tmp_path / "adapter", tiny_llama_dir, target_modules=["q_proj"])
    to = tmp_path / "to"
    with pytest.raises(ModelError, match="Merge it first: ebft merge-lora"):
        quantize_model(adapter, to, QuantizationSection(), lambda tokenizer: [])
    again = tmp_path / "quantised"
    again.mkdir()
    (again / "config.json").write_text('{"quantization_config": {"quant_method": "torchao"}}')
    with pytest.raises(ModelError, match="quantised is already quantised .torchao."):
        quantize_model(again, to, QuantizationSection(), lambda tokenizer: [])
    base = save_base(tmp_path / "base", llama(tie_word_embeddings=True))
    AutoTokenizer.from_pretrained(tiny_llama_dir).save_pretrained(base)
    with pytest.raises(ModelError, match="quantize_embedding: the embeddings are also the output layer"):
        quantize_model(base, to, QuantizationSection(quantize_embedding=True), lambda tokenizer: [])
