"""Values in config.json, and the settings of a saved adapter, read before a model is loaded."""

import json

import pytest

from ebft.models.files import adapted_head, adapted_heads, task_problem, wrong_values


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("vocab_size", ["many", 0]),
        ("hidden_size", ["big", -32, 0, None, True]),
        ("num_hidden_layers", [-1]),
        ("num_attention_heads", [0]),
        ("num_key_value_heads", [0]),
        ("max_position_embeddings", [-1]),
        ("dtype", ["float99", "int32"]),
        ("attention_dropout", [2.0, -0.1]),
        ("text_config.resid_pdrop", [1]),
        ("quantization_config", ["gptq", {"bits": 4}]),
        ("rope_theta", ["1e4"]),
        ("rope_parameters.rope_theta", ["1e4", -5, 0, float("nan")]),
        ("rope_scaling.factor", ["8", 0]),
        ("rope_parameters.full_attention.mscale", [-1]),
    ],
)
def test_values_that_no_model_has(name, values):
    for value in values:
        content = value
        for key in reversed(name.split(".")):
            content = {key: content}
        found = [(key, wrong) for key, wrong, _ in wrong_values(content)]
        assert found == [(name.removeprefix("text_config."), value)]


def test_values_that_some_models_have():
    rates = {"resid_pdrop": False, "embd_pdrop": True, "attention_dropout": 0.1, "classifier_dropout": None}
    rope = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000, "mscale": 0}, "quantization_config": None}
    sizes = {"hidden_size": [32, 64], "num_key_value_heads": None, "num_hidden_layers": 0}
    for values in ({**rates, **rope, **sizes}, {"hidden_size": None, "text_config": {"hidden_size": 32}}):
        assert list(wrong_values(values)) == []


def adapter(folder, **settings):
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **settings}))
    return str(folder)


@pytest.mark.parametrize(
    ("task", "ending", "message"),
    [
        ("CAUSAL_LM", "ForCausalLM", None),
        (None, "ForCausalLM", None),
        ("SEQ_CLS", "ForSequenceClassification", None),
        ("CAUSAL_LM", "ForSequenceClassification", "is an adapter of a language model, but this run trains a reward m"),
        ("SEQ_CLS", "ForCausalLM", "is an adapter of a reward model (reward_model: true), but this run trains a langu"),
        ("TOKEN_CLS", "ForSequenceClassification", "is an adapter of a process reward model"),
        (None, "ForTokenClassification", "is an adapter of no task, but this run trains a process reward model"),
        ("SEQ_2_SEQ_LM", "ForCausalLM", "is an adapter of another kind of model (task_type: 'SEQ_2_SEQ_LM')"),
    ],
)
def test_the_task_of_an_adapter(task, ending, message, tmp_path):
    found = task_problem(adapter(tmp_path, task_type=task), ending)
    assert found is None if message is None else message in found
    assert ("ebft merge-lora" in (found or "")) == (task == "CAUSAL_LM" and message is not None)


def test_targets_are_expressions_or_names():
    assert list(adapted_heads(".*(proj|head)")) == ["lm_head"]
    assert list(adapted_heads(r"^(?!lm_head).*proj")) == list(adapted_heads("(")) == list(adapted_heads(None)) == []
    assert list(adapted_heads(["q_proj", "embed_out"])) == ["embed_out"]


def test_the_output_layer_of_an_adapter(tmp_path):
    assert task_problem(str(tmp_path), "ForCausalLM") is None
    (tmp_path / "adapter_config.json").write_text("{")
    assert task_problem(str(tmp_path), "ForCausalLM") is None and adapted_head(str(tmp_path)) is None
    for settings, found in (
        ({"target_modules": ["q_proj"]}, None),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, None),
        ({"target_modules": ".*", "exclude_modules": ["lm_head", "embed_out"]}, None),
    ):
        assert adapted_head(adapter(tmp_path, **settings)) == found
