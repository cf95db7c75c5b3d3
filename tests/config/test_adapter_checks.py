"""Keys of adapters that exclude each other, and parameters that are trained without one."""

import warnings

import pytest

from ebft.errors import ConfigError

LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
EXPERTS = {**LORA, "lora_target_parameters": ["mlp.experts.down_proj"]}
PROMPTS = {"datasets": [{"path": "some/rows", "type": "ebft_opencode.transform"}], "rl": "ebft"}
VLLM = {**PROMPTS, "trl": {"use_vllm": True, "vllm_mode": "managed"}}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({**LORA, "peft_layers_pattern": "layers"}, "no effect without peft_layers_to_transform"),
        (
            {**LORA, "lora_target_linear": False, "lora_target_modules": ".*q", "peft_layers_to_transform": 1},
            "peft_layers_to_transform is not supported with a regular expression",
        ),
        ({**LORA, "lora_r": 7, "peft_init_lora_weights": "orthogonal"}, "requires an even lora_r, not 7"),
        ({**LORA, "peft_init_lora_weights": "pissa"}, "peft_init_lora_weights: invalid value 'pissa'; expected"),
        ({**LORA, **VLLM, "peft_use_dora": True}, "vLLM does not load DoRA adapters"),
        ({**EXPERTS, **VLLM}, "with trl.use_vllm: vLLM does not load"),
        ({**EXPERTS, "lora_dropout": 0.1}, "with lora_dropout: 0.1: the adapter has no input of its own"),
        ({**EXPERTS, "peft_use_dora": True}, "with peft_use_dora: true: PEFT has no DoRA"),
        ({**EXPERTS, "peft_layers_to_transform": [1]}, "name the layers, such as layers.1.mlp.experts"),
        ({**EXPERTS, "peft_init_lora_weights": "orthogonal"}, "orthogonal: experts are stacked"),
        ({**EXPERTS, "load_in_8bit": True}, "with load_in_8bit: they must be dense"),
        ({**EXPERTS, "fsdp": True}, "lora_target_parameters is not supported with fsdp"),
        ({**EXPERTS, "deepspeed": "zero2"}, "lora_target_parameters is not supported with deepspeed"),
        ({**LORA, "unfrozen_parameters": ["lm_head"]}, "lora_modules_to_save trains modules in addition"),
        ({"unfrozen_parameters": ["lm_head.weight$[:128]"]}, "selects rows of a parameter"),
        ({"unfrozen_parameters": ["(lm_head"]}, "is not a valid regular expression"),
        ({"peft": {"loftq_config": {"loftq_bits": 4}}}, "peft is not supported: LoftQ replaces the base weights"),
        ({**LORA, "lora_target_linear": False, "lora_target_modules": "all-linear"}, "contradicts lora_target_l"),
        ({**LORA, "lora_target_modules": ["all-linear", "lm_head"]}, "too: lm_head. .* replace all-linear"),
        ({"relora_steps": 100}, "relora_steps is not supported: ReLoRA merges"),
    ],
)
def test_what_excludes_what(make, keys, message):
    with pytest.raises(ConfigError, match=message):
        make(**keys)


@pytest.mark.parametrize("given", ["all-linear", ["all-linear"]])
@pytest.mark.parametrize("linear", [{}, {"lora_target_linear": True}])
def test_all_linear_is_an_alias_also_in_the_config_that_a_run_saves(make, given, linear):
    keys = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_modules": given, **linear}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = make(**keys)
        again = type(config).from_dict(config.model_dump(exclude_unset=True))
    assert config.lora_target_linear and config.lora_target_modules is None
    assert again == config


def test_parameters_are_targets_enough(make):
    keys = {**EXPERTS, "lora_target_linear": False}
    assert make(**keys).lora_target_parameters == ["mlp.experts.down_proj"]


def test_settings_of_lora_without_an_adapter_warn(make):
    with pytest.warns(UserWarning, match="peft_use_dora, peft_layers_to_transform: no effect because adapter"):
        make(peft_use_dora=True, peft_layers_to_transform=[1])


def test_dora_without_vllm_is_accepted_in_structured_mode(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make(**LORA, **PROMPTS, micro_batch_size=4, peft_use_dora=True).peft_use_dora
