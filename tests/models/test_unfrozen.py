"""Training of some parameters of the model."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ebft.errors import ModelError
from ebft.models.load import load_model
from ebft.models.tokenizer import load_tokenizer


def loaded(make_config, checkpointing=False, **keys):
    config = make_config(special_tokens={"pad_token": "<|end|>"}, **keys)
    return load_model(config, load_tokenizer(config), gradient_checkpointing=checkpointing)


def trained(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_names_are_compared_from_the_start(make_config):
    up, down = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("up", "down"))
    patterns = ["lm_head", r"model\.layers\.1\.mlp\.(up|down)"]
    assert trained(loaded(make_config, unfrozen_parameters=patterns)) == [up, down, "lm_head.weight"]
    assert len(trained(loaded(make_config))) == 21
    with pytest.raises(ModelError, match="unfrozen_parameters: 'layers' matches no parameter. Names are compared from"):
        loaded(make_config, unfrozen_parameters=["lm_head", "layers"])


def test_a_tied_output_layer_is_named(make_config, tiny_llama_dir, tmp_path):
    config = AutoConfig.from_pretrained(tiny_llama_dir, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_llama_dir).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="matches lm_head.weight, which is the same parameter as model.embed_tokens"):
        loaded(make_config, base_model=str(tmp_path), unfrozen_parameters=["^lm_head.weight$"])
    model = loaded(make_config, base_model=str(tmp_path), unfrozen_parameters=["model.embed"])
    assert trained(model) == ["model.embed_tokens.weight"]


def test_reentrant_checkpointing_with_frozen_embeddings(make_config):
    model = loaded(make_config, checkpointing=True, unfrozen_parameters=[r"model\.layers\.0\.mlp"])
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.train()
    ids = torch.tensor([[1, 2, 3, 4]])
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(model.get_parameter(name).grad.abs().sum() > 0 for name in trained(model))
