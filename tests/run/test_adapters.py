"""Runs with variants of LoRA and with frozen weights: saved, resumed and merged."""

import importlib.util

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from ebft import errors, evaluate, train
from ebft.tools.export.merge import MergeSource, adapter_in_folder, adapter_of_run, merge_adapter
from ebft.tools.inference.models import model_in_folder, model_of_run
from tests.run.conftest import LORA, assert_equal, strided, weights

SOME = {**LORA, "lora_target_linear": False}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
VARIANTS = {
    "dora": {**SOME, "lora_target_modules": ["q_proj"], "peft_use_dora": True},
    "rslora of some layers": {**LORA, "peft_use_rslora": True, "peft_layers_to_transform": [1]},
    "experts": {**SOME, "lora_target_parameters": EXPERTS},
    "experts and attention": {**SOME, "lora_target_parameters": EXPERTS[:1], "lora_target_modules": ["q_proj"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_adapter_is_saved_resumed_and_merged(variant, make, resumed, moe, tmp_path):
    first = resumed(**VARIANTS[variant], base_model=moe).model
    moved = [weight.abs().sum() > 0 for name, weight in first.named_parameters() if "lora_B" in name]
    assert moved and all(moved)
    merge_adapter(MergeSource(tmp_path / "a", str(moe)), tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(moe)
    expected = PeftModel.from_pretrained(base, tmp_path / "a").merge_and_unload().state_dict()
    assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict(), expected)
    going_on = {"adapter": "lora", "lora_model_dir": tmp_path / "a", "base_model": moe, "max_steps": 1}
    again = train(strided(make, **going_on, output_dir=tmp_path / "c")).model
    assert weights(again).keys() == weights(first).keys()


def test_frozen_weights_do_not_move(make, resumed, tmp_path):
    keys = {"unfrozen_parameters": ["lm_head", r"model\.layers\.1"]}
    first = weights(resumed(**keys).model)
    before = weights(AutoModelForCausalLM.from_pretrained(make().base_model))
    moved = {name for name, value in first.items() if not value.equal(before[name])}
    assert moved == {name for name in before if name.startswith(("lm_head", "model.layers.1"))}
    assert_equal(weights(AutoModelForCausalLM.from_pretrained(tmp_path / "a")), first)
    changed = {"unfrozen_parameters": ["lm_head"], "auto_resume_from_checkpoints": True, "output_dir": tmp_path / "b"}
    with pytest.raises(errors.ConfigError, match='unfrozen_parameters: .*"lm_head"'):
        train(strided(make, **changed))


def test_what_could_not_be_quantised_is_not_quantised_later_either(make, out, tmp_path, monkeypatch, capsys):
    pytest.importorskip("bitsandbytes")
    config = strided(make, **LORA | {"adapter": "qlora", "load_in_4bit": True}, val_set_size=2)
    find = importlib.util.find_spec
    with monkeypatch.context() as without:
        without.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
        without.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.warns(UserWarning, match="load_in_4bit has no effect"):
            trained = train(config).model
    assert "parameters trained, float32" in capsys.readouterr().err
    assert "LoRA adapter" in (card := (out / "README.md").read_text()) and "QLoRA" not in card
    merge_adapter(adapter_of_run(config), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    models = [merged, model_of_run(config).tuned, model_in_folder(str(out)).tuned]
    assert adapter_in_folder(out).quantised is None
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        for model in models:
            torch.testing.assert_close(model(ids).logits, trained.eval()(ids).logits)
    of_run, of_merged = evaluate(config, [str(out), str(tmp_path / "merged")]).models
    assert of_run.metrics["ce_loss"] == pytest.approx(of_merged.metrics["ce_loss"])
