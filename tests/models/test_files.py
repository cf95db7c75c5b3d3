"""The settings of a saved adapter, read before a model is loaded."""

import json

import pytest

from ebft.models.files import adapted_head, adapted_heads, task_problem


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
