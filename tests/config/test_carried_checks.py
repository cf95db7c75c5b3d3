"""Keys that configs for axolotl carry: accepted, converted or refused with the reason."""

import pytest

from ebft.config.axolotl import UNSUPPORTED_KEYS
from ebft.errors import ConfigError
from ebft.run.checks import check_runnable
from tests.config.conftest import warned

STRIDED = {"rl": "ebft", "ebft": {"mode": "strided"}}
AXOLOTL = "axolotl.integrations."


@pytest.mark.parametrize(("keys", "message"), [
    ({"warmup_steps": 1.5}, "warmup_steps"),
    ({"tensor_parallel_size": 2}, "tensor_parallel_size: 2 is not supported: layers are not split"),
    ({"context_parallel_size": 4}, "context_parallel_size: 4 is not supported: sequences are not split"),
    ({"dp_replicate_size": 2}, "dp_replicate_size: 2 is not supported"),
    ({"expert_parallel_size": 2}, "expert_parallel_size: 2 is not supported"),
    ({"dp_shard_size": 2}, "dp_shard_size: 2 needs fsdp"),
    ({"dataloader_prefetch_factor": 8}, "needs dataloader_num_workers of at least 1"),
    ({"torch_compile_backend": "inductor"}, "no effect without torch_compile: true"),
    ({"torch_compile_mode": "default"}, "no effect without torch_compile: true"),
    ({"loss_watchdog_patience": 2}, "no effect without loss_watchdog_threshold"),
    ({"bnb_config_kwargs": {"bnb_4bit_quant_type": "fp4"}}, "bnb_4bit_quant_type: fp4 is not supported"),
    ({"bnb_config_kwargs": {"llm_int8_threshold": 6.0}}, "llm_int8_threshold: 6.0 is not supported"),
    ({"cosine_min_lr_ratio": 0.1, "lr_scheduler": "linear"}, "needs lr_scheduler: cosine, not linear"),
    ({"neftune_noise_alpha": 5, **STRIDED}, "neftune_noise_alpha is not supported with strided mode: embedding"),
    ({"overrides_of_model_config": {"router_aux_loss_coef": 0.1}, **STRIDED},
     "overrides_of_model_config is not supported with strided mode, whose loss has no term for the router"),
    ({"embedding_lr": 1e-4, "embedding_lr_scale": 2.0}, "embedding_lr and embedding_lr_scale are both set"),
    ({"embedding_lr": 1e-4, "deepspeed": "zero2"}, "embedding_lr is not supported with deepspeed"),
    ({"loraplus_lr_ratio": 16.0}, "no effect without an adapter"),
    ({"loraplus_lr_embedding": 1e-6}, "no effect without loraplus_lr_ratio"),
    ({"early_stopping_patience": 2}, "early_stopping_patience needs held-out data"),
    ({"early_stopping_patience": 2, "val_set_size": 2, "eval_strategy": "no"}, "needs evaluations"),
    ({"early_stopping_patience": 2, "val_set_size": 2, "evals_per_epoch": 0}, "needs evaluations"),
    ({"chat_template": "jinja"}, "chat_template: jinja needs the text"),
    ({"chat_template": "chatml", "chat_template_jinja": "{{ a }}"}, "are both set. Keep one"),
    ({"plugins": [AXOLOTL + "spectrum.SpectrumPlugin"]}, "list the parameters in unfrozen_parameters. Remove it"),
    ({"plugins": [AXOLOTL + "kd.KDPlugin"]}, "kd.KDPlugin is a plugin for axolotl .* the loss has no teacher"),
    ({"plugins": [AXOLOTL + "new.NewPlugin"]}, "new.NewPlugin is a plugin for axolotl .* it does not run here"),
    ({"noisy_embedding_alpha": 5}, "Use 'neftune_noise_alpha' instead"),
    ({"processor_type": "AutoProcessor"}, "processor_type is not supported: models are trained on text only"),
    ({"auto_find_batch_size": True}, "`ebft doctor` measures"),
    ({"batch_size": 8}, "batch_size is micro_batch_size times gradient_accumulation_steps. Set one of them"),
    ({"batch_size": 8, "micro_batch_size": 3}, "batch_size: 8 is not a multiple of micro_batch_size: 3"),
    ({"batch_size": 8, "micro_batch_size": 2, "gradient_accumulation_steps": 2},
     "batch_size: 8 is not micro_batch_size: 2 times gradient_accumulation_steps: 2. Remove batch_size"),
])  # fmt: skip
def test_what_is_refused(make, keys, message):
    with pytest.raises(ConfigError, match=message):
        make(**keys)


def test_keys_that_ask_for_nothing(make):
    for empty in (None, False, [], ""):
        assert warned(make, **dict.fromkeys(UNSUPPORTED_KEYS, empty))[1] == []
    sizes = ("tensor_parallel_size", "context_parallel_size", "dp_replicate_size", "dp_shard_size")
    assert warned(make, **dict.fromkeys((*sizes, "expert_parallel_size"), 1))[1] == []
    used = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "llm_int8_has_fp16_weight": False}
    assert warned(make, bnb_config_kwargs=used)[1] == []


def test_keys_that_repeat_another_key(make):
    data = {"path": "some/data", "type": "chat_template", "conversation": "chatml"}
    keys = {"chat_template": "chatml", "datasets": [data], "test_datasets": [data]}
    config, messages = warned(make, bf16=True, bfloat16=True, **keys)
    assert config.bf16 is True and config.chat_template == "chatml" and messages == []
    assert make(datasets=[{**data, "chat_template": "chatml"}]).chat_template == "chatml"
    with pytest.raises(ConfigError, match="bfloat16 is not supported: set bf16: true"):
        make(bf16=False, bfloat16=True)
    with pytest.raises(ConfigError, match="datasets.0.conversation is not supported: set chat_template"):
        make(**{**keys, "chat_template": "llama3"})


def test_the_model_is_sharded_over_all_processes(make, tmp_path):
    config = make(fsdp=True, dp_shard_size=4, output_dir=str(tmp_path))
    check_runnable(config, processes=4)
    with pytest.raises(ConfigError, match="dp_shard_size: 4, but the model is sharded over all 2 processes"):
        check_runnable(config, processes=2)


def test_plugins_of_axolotl_are_replaced(make):
    names = ["liger.LigerPlugin", "cut_cross_entropy.CutCrossEntropyPlugin", "kernels.KernelsPlugin"]
    names += ["nemo_gym.NemoGymPlugin"]
    config, messages = warned(make, plugins=["my_plugins.Mine", *(AXOLOTL + name for name in names)])
    assert config.plugins == ["my_plugins.Mine"] and len(messages) == 4
    assert messages[0].startswith(f"plugins: {AXOLOTL}liger.LigerPlugin has no effect: liger_rope, ")


def test_other_names_of_templates_and_of_the_router(make):
    for keys in ({}, {"chat_template": "jinja"}):
        config = make(chat_template_jinja="{{ messages }}", **keys)
        assert config.chat_template == "{{ messages }}" and config.chat_template_jinja is None
    assert make(model_config={"output_router_logits": True}).overrides_of_model_config.output_router_logits is True


@pytest.mark.parametrize("key", ["early_stopping_patience", "evals_per_epoch"])
def test_held_out_data_is_there_for_what_needs_it(make, key):
    assert getattr(make(val_set_size=2, **{key: 2}), key) == 2
