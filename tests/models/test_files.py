"""The settings of a saved adapter, read before a model is loaded."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ebft import errors
from ebft.models.adapter import load_saved_adapter


def adapter(folder, **settings):
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **settings}))
    return str(folder)


@pytest.mark.parametrize(("task", "model", "fits"), [
    (None, AutoModelForCausalLM, True), ("CAUSAL_LM", AutoModelForSequenceClassification, False),
    ("SEQ_CLS", AutoModelForCausalLM, False),
])  # fmt: skip
def test_the_task_of_an_adapter(task, model, fits, tiny_llama_dir, tmp_path):
    """Those of another task would be attached, with an output layer that is not the trained one."""
    message = "has no adapter_model.safetensors" if fits else "has another output layer"
    with pytest.raises(errors.ModelError, match=message):
        load_saved_adapter(model.from_pretrained(tiny_llama_dir), adapter(tmp_path, task_type=task))
