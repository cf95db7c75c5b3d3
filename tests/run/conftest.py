"""Runs that tests of crashes and of interruptions compare with, and configs of short runs."""

import json
import textwrap

import pytest
import torch

from ebft import train
from ebft.run.config.schema import RunConfig
from tests.run.crash import config_of, result, trained, write_inputs

LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}
STRIDED = {"rl": "ebft", "ebft": {"mode": "strided", "generate_max_len": 4, "n_samples_per_prompt": 2}}


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="session")
def unbroken(inputs, tmp_path_factory):
    """`unbroken(method)`: the result of a run that nothing stops; each is made once."""
    made = {}

    def of(method, **changes):
        key = method, *map(str, changes.items())
        if key not in made:
            out = tmp_path_factory.mktemp(method) / "out"
            trained(config_of(method, inputs, out, **changes))
            made[key] = result(out)
        return made[key]

    return of


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Twelve rows of source code in a JSON Lines file."""
    with open(textwrap.__file__) as file:
        source = file.read()
    path = tmp_path_factory.mktemp("text") / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": source[at : at + 400]}) for at in range(0, 4800, 400)))
    return path


@pytest.fixture
def make(tiny_llama_dir, text, out):
    """`make(**keys)`: a config for two steps over that text."""

    def make_config(type="completion", **keys):
        values = {"base_model": tiny_llama_dir, "datasets": [{"path": text, "type": type}], "output_dir": out}
        values |= {"special_tokens": {"pad_token": "<|end|>"}, "sequence_len": 48, "micro_batch_size": 2}
        return RunConfig.from_dict({**values, "max_steps": 2, "learning_rate": 1e-3, **keys})

    return make_config


def strided(make, **keys):
    return make("ebft_pretrain.transform", **{**STRIDED, **keys})


@pytest.fixture
def resumed(make, tmp_path):
    """`resumed(**keys)`: the trainer of a run of four steps; one that is resumed at its second step ends as it does."""

    def of(**keys):
        keys = {"max_steps": 4, "save_steps": 2, **keys}
        first = train(strided(make, **keys, output_dir=tmp_path / "a")).trainer
        resume = {"resume_from_checkpoint": tmp_path / "a" / "checkpoint-2"}
        second = train(strided(make, **keys, output_dir=tmp_path / "b", **resume)).trainer
        assert second.state.global_step == first.state.global_step == 4
        assert_equal(weights(second.model), weights(first.model))
        return first

    return of


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_equal(ours, theirs):
    """The weights of two models, by name, have the same bits."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=0, msg=name)


@pytest.fixture
def moe(tiny_llama_dir, tmp_path):
    """A random mixture of four experts, in a folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig

    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MixtralConfig(vocab_size=512, num_key_value_heads=2, num_local_experts=4, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "moe")
    AutoTokenizer.from_pretrained(tiny_llama_dir).save_pretrained(tmp_path / "moe")
    return tmp_path / "moe"
