"""Runs with variants of LoRA and with frozen weights: saved, resumed and merged."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig

from ebft import train
from ebft.errors import ConfigError
from ebft.tools.export.merge import MergeSource, merge_adapter
from tests.run.test_training import LORA, make, strided, text, weights  # noqa: F401 - fixtures

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
VARIANTS = {
    "dora": {**LORA, "lora_target_linear": False, "lora_target_modules": ["q_proj"], "peft_use_dora": True},
    "rslora of some layers": {**LORA, "peft_use_rslora": True, "peft_layers_to_transform": [1]},
    "experts": {**LORA, "lora_target_linear": False, "lora_target_parameters": EXPERTS},
    "experts and attention": {
        **LORA,
        "lora_target_linear": False,
        "lora_target_parameters": EXPERTS[:1],
        "lora_target_modules": ["q_proj"],
    },
}


@pytest.fixture
def moe(tiny_llama_dir, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MixtralConfig(vocab_size=512, num_key_value_heads=2, num_local_experts=4, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "moe")
    AutoTokenizer.from_pretrained(tiny_llama_dir).save_pretrained(tmp_path / "moe")
    return tmp_path / "moe"


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_adapter_is_saved_resumed_and_merged(variant, make, moe, tmp_path):  # noqa: F811
    keys = {**VARIANTS[variant], "max_steps": 4, "save_steps": 2, "base_model": moe}
    first = train(strided(make, **keys, output_dir=tmp_path / "a")).model
    checkpoint = tmp_path / "a" / "checkpoint-2"
    resumed = train(strided(make, **keys, output_dir=tmp_path / "b", resume_from_checkpoint=checkpoint)).model
    for name, value in weights(resumed).items():
        torch.testing.assert_close(value, weights(first)[name], rtol=0, atol=0)
    moved = [weight.abs().sum() > 0 for name, weight in first.named_parameters() if "lora_B" in name]
    assert moved and all(moved)
    merge_adapter(MergeSource(tmp_path / "a", str(moe)), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    base = AutoModelForCausalLM.from_pretrained(moe)
    expected = PeftModel.from_pretrained(base, tmp_path / "a").merge_and_unload().state_dict()
    assert merged.keys() == expected.keys() and all(torch.equal(merged[name], expected[name]) for name in merged)
    going_on = {"adapter": "lora", "lora_model_dir": tmp_path / "a", "base_model": moe, "max_steps": 1}
    again = train(strided(make, **going_on, output_dir=tmp_path / "c")).model
    assert weights(again).keys() == weights(first).keys()


def test_frozen_weights_do_not_move(make, tmp_path):  # noqa: F811
    keys = {"max_steps": 4, "save_steps": 2, "unfrozen_parameters": ["lm_head", r"model\.layers\.1"]}
    first = train(strided(make, **keys, output_dir=tmp_path / "a")).model
    before = weights(AutoModelForCausalLM.from_pretrained(make().base_model))
    moved = {name for name, value in weights(first).items() if not value.equal(before[name])}
    assert moved == {name for name in before if name.startswith(("lm_head", "model.layers.1"))}
    checkpoint = tmp_path / "a" / "checkpoint-2"
    resumed = train(strided(make, **keys, output_dir=tmp_path / "b", resume_from_checkpoint=checkpoint)).model
    assert all(value.equal(weights(first)[name]) for name, value in weights(resumed).items())
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert all(value.equal(weights(first)[name]) for name, value in weights(saved).items())
    with pytest.raises(ConfigError, match='unfrozen_parameters: .*"lm_head"'):
        changed = {**keys, "unfrozen_parameters": ["lm_head"]}
        train(strided(make, **changed, output_dir=tmp_path / "b", auto_resume_from_checkpoints=True))
