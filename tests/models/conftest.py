"""A run config over the tiny model, and other models with its tokenizer."""

import pytest


@pytest.fixture
def make_config(tiny_llama_dir):
    from ebft.run.config.schema import RunConfig

    def make(**keys):
        values = {"base_model": str(tiny_llama_dir), "sequence_len": 64}
        return RunConfig.from_dict(values | {"datasets": [{"path": "unused", "type": "completion"}]} | keys)

    return make


@pytest.fixture
def make_base(tiny_llama_dir, tmp_path):
    """`make_base(model)`, or `make_base(**changes)` of the tiny model's config: a folder with it and the tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    def make(model=None, **changes):
        folder = tmp_path / f"base-{len(list(tmp_path.iterdir()))}"
        config = AutoConfig.from_pretrained(tiny_llama_dir, **changes)
        (AutoModelForCausalLM.from_config(config) if model is None else model).save_pretrained(folder)
        AutoTokenizer.from_pretrained(tiny_llama_dir).save_pretrained(folder)
        return str(folder)

    return make
