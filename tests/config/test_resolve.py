"""Keys that are other names of other keys, that ask for nothing, or that are replaced."""

import pytest

from ebft.config.axolotl import IGNORED_KEYS, UNSUPPORTED_KEYS, CarriedOverKeys
from tests.config.conftest import strided, warned
from tests.config.test_messages import AXOLOTL, EXPERTS


@pytest.mark.parametrize(("keys", "expected"), [
    *(({flag: True, **more}, value)
      for flag, value in (("flash_attention", "flash_attention_2"), ("flex_attention", "flex_attention"),
                          ("sdp_attention", "sdpa"), ("eager_attention", "eager"))
      for more in ({}, {"attn_implementation": value})),
    ({"flash_attention": False}, None), ({"flash_attention": False, "flex_attention": True}, "flex_attention"),
    ({"attn_implementation": "flex"}, "flex_attention"),
    ({"attn_implementation": "kernels-community/flash-attn2"}, "kernels-community/flash-attn2"),
])  # fmt: skip
def test_flags_are_other_names(make, keys, expected):
    assert make(**keys).attn_implementation == expected
    assert not [key for key in keys if key != "attn_implementation" and make(**keys).model_dump()[key] is not None]


def test_what_replaces_what(make):
    config = warned(make, **strided(n_samples_per_prompt=1))[0]
    assert config.ebft.advantage_estimator == "reinforce" and config.ebft.diversity_coef == 0
    saved = make(adapter="lora", lora_model_dir="some/adapter")  # which has its own settings
    assert saved.lora_r is saved.lora_alpha is make().lora_alpha is None
    keys = {"adapter": "lora", "lora_target_linear": True, "lora_r": 8}
    assert make(**keys).lora_alpha == 16 and make(**keys, lora_alpha=8).lora_alpha == 8
    config = make(chat_template_jinja="{{ messages }}", chat_template="jinja")
    assert config.chat_template == "{{ messages }}" and config.chat_template_jinja is None
    assert make(model_config={"output_router_logits": True}).overrides_of_model_config.output_router_logits is True
    assert make(wandb_run_id="a").wandb_name == "a" and make(wandb_run_id="a", wandb_name="b").wandb_name == "b"
    keys = {**EXPERTS, "lora_target_linear": False}  # parameters are targets enough
    assert make(**keys).lora_target_parameters == ["mlp.experts.down_proj"]


def test_ignored_keys_say_once_that_they_have_no_effect(make):
    assert set(IGNORED_KEYS) == set(CarriedOverKeys.model_fields)
    values = {"save_safetensors": False, "merge_method": "legacy", "strict": True, "fsdp_version": 1}
    values["model_type"] = "LlamaForCausalLM"
    for key in IGNORED_KEYS:
        value = values.get(key, "another value")
        messages = warned(make, **{key: value})[1]
        said = [message for message in messages if message.startswith(f"{key}: ") and "has no effect" in message]
        assert len(messages) == len(said) == (key != "strict"), key
    harmless = {key: ignored.harmless[0] for key, ignored in IGNORED_KEYS.items() if ignored.harmless}
    assert warned(make, **harmless)[1] == []


@pytest.mark.parametrize("given", ["all-linear", ["all-linear"]])
def test_all_linear_is_an_alias_also_in_the_config_that_a_run_saves(make, given):
    keys = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_modules": given}
    config, messages = warned(make, **keys)
    assert config.lora_target_linear and config.lora_target_modules is None and messages == []
    others = warned(make, **keys | {"lora_target_modules": ["all-linear", "embed_tokens"]})[0]
    assert others.lora_target_linear and others.lora_target_modules == ["embed_tokens"]
    assert warned(type(config).from_dict, values=config.model_dump(exclude_unset=True)) == (config, [])


def test_keys_that_ask_for_nothing(make):
    for empty in (None, False, [], ""):
        assert warned(make, **dict.fromkeys(UNSUPPORTED_KEYS, empty))[1] == []
    sizes = ("tensor_parallel_size", "context_parallel_size", "dp_replicate_size", "dp_shard_size")
    assert warned(make, **dict.fromkeys((*sizes, "expert_parallel_size"), 1))[1] == []
    used = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "llm_int8_has_fp16_weight": False}
    assert warned(make, bnb_config_kwargs=used)[1] == []


def test_keys_that_repeat_another_key(make):
    data = {"path": "some/data", "type": "sharegpt", "conversation": "llama-3", "field_human": "me", "field_model": ""}
    for keys in ({}, {"chat_template": "llama3"}):
        config, messages = warned(make, bf16=True, bfloat16=True, **keys, datasets=[data], test_datasets=[data])
        assert config.bf16 is True and config.chat_template == "llama3" and messages == []
        assert config.datasets[0].roles == {"user": ["me"]}
    assert make(trl={"vllm_importance_sampling_clip_max": 2.0}).trl.vllm_importance_sampling_cap == 2.0
    config, messages = warned(make, adapter="lora", lora_r=2, lora_target_linear=True, load_in_4bit=True, dpo_beta="")
    assert config.adapter == "qlora" and messages[0].startswith("adapter: lora is replaced with adapter: qlora")
    config, messages = warned(make, deepspeed="/workspace/axolotl/deepspeed_configs/zero2.json")
    assert config.deepspeed == "zero2" and "does not exist: it is replaced with zero2" in messages[0]
    grpo = make(rl="grpo", rl_beta=0.3, trl={"reward_funcs": ["a.b"], "beta": None}, datasets=[{"path": "a"}])
    assert grpo.trl.beta == 0.3 and make(rl="dpo", trl={"beta": 0.3}, datasets=[{"path": "a"}]).rl_beta == 0.3
    config, messages = warned(make, deepspeed="zero2", rl="dpo", datasets=[{"path": "a", "type": "chatml"}])
    assert config.deepspeed is None and messages[0].startswith("deepspeed has no effect with rl: dpo")
    with pytest.warns(UserWarning, match="bfloat16: true is replaced with bf16: true"):
        assert make(bf16=False, bfloat16=True).bf16 is True


def test_plugins_of_axolotl_are_replaced(make):
    names = ["liger.Liger", "cut_cross_entropy.CutCrossEntropy", "kernels.Kernels", "nemo_gym.NemoGym"]
    config, messages = warned(make, plugins=["my_plugins.Mine", *(f"{AXOLOTL}{name}Plugin" for name in names)])
    assert config.plugins == ["my_plugins.Mine"] and len(messages) == 4
    assert messages[0].startswith(f"plugins: {AXOLOTL}liger.LigerPlugin has no effect: liger_rope, ")
