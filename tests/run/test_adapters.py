"""Runs with variants of LoRA and with frozen weights: saved, resumed and merged."""

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from ebft import train
from ebft.errors import ConfigError
from ebft.tools.export.merge import MergeSource, merge_adapter
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
    with pytest.raises(ConfigError, match='unfrozen_parameters: .*"lm_head"'):
        train(strided(make, **changed))
