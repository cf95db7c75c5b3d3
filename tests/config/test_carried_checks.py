"""Keys that configs for axolotl carry: accepted, converted or refused with the reason."""

import warnings

import pytest

from ebft.config.axolotl import UNSUPPORTED_KEYS
from ebft.errors import ConfigError
from ebft.run.checks import Machine, check_runnable
from ebft.run.trainer import training_kwargs

STRIDED = {"rl": "ebft", "ebft": {"mode": "strided"}}
AXOLOTL = "axolotl.integrations."


def warned(make, **keys):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return make(**keys), [str(warning.message) for warning in caught]


def arguments(config, has_eval=False):
    return training_kwargs(config, Machine(has_accelerator=False, supports_bf16=False), 100, has_eval)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
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
        (
            {"overrides_of_model_config": {"router_aux_loss_coef": 0.1}, **STRIDED},
            "overrides_of_model_config is not supported with strided mode, whose loss has no term for the router",
        ),
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
        (
            {"batch_size": 8, "micro_batch_size": 2, "gradient_accumulation_steps": 2},
            "batch_size: 8 is not micro_batch_size: 2 times gradient_accumulation_steps: 2. Remove batch_size",
        ),
    ],
)
def test_what_is_refused(make, keys, message):
    with pytest.raises(ConfigError, match=message):
        make(**keys)


@pytest.mark.parametrize("empty", [None, False, [], ""])
def test_unsupported_keys_that_ask_for_nothing(make, empty):
    assert warned(make, **dict.fromkeys(UNSUPPORTED_KEYS, empty))[1] == []


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


def test_sizes_of_one(make):
    keys = ("tensor_parallel_size", "context_parallel_size", "dp_replicate_size", "dp_shard_size")
    assert warned(make, **dict.fromkeys((*keys, "expert_parallel_size"), 1))[1] == []


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


def test_the_router_of_an_older_config(make):
    assert make(model_config={"output_router_logits": True}).overrides_of_model_config.output_router_logits is True


def test_the_text_of_a_chat_template(make):
    for keys in ({}, {"chat_template": "jinja"}):
        config = make(chat_template_jinja="{{ messages }}", **keys)
        assert config.chat_template == "{{ messages }}" and config.chat_template_jinja is None


def test_settings_of_bitsandbytes_that_are_used_anyway(make):
    used = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "llm_int8_has_fp16_weight": False}
    assert warned(make, bnb_config_kwargs=used)[1] == []


def test_the_last_learning_rate_of_a_cosine(make):
    found = arguments(make(cosine_min_lr_ratio=0.25))
    assert found["lr_scheduler_type"] == "cosine_with_min_lr"
    assert found["lr_scheduler_kwargs"] == {"min_lr_rate": 0.25}
    assert arguments(make())["lr_scheduler_type"] == "cosine"


def test_arguments_of_the_trainer(make):
    keys = {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 8, "neftune_noise_alpha": 5.0}
    keys |= {"torch_compile": True, "torch_compile_backend": "inductor", "torch_compile_mode": "default"}
    found = arguments(make(**keys, trackio_space_id="me/space"))
    assert {key: found[key] for key in keys} == keys and found["trackio_space_id"] == "me/space"
    assert make(torch_compile="auto").torch_compile is False


@pytest.mark.parametrize("given", [{"micro_batch_size": 2}, {"gradient_accumulation_steps": 4}])
def test_the_batch_of_an_optimizer_step(make, given):
    found = arguments(make(batch_size=8, **given))
    assert (found["per_device_train_batch_size"], found["gradient_accumulation_steps"]) == (2, 4)
    assert arguments(make(batch_size=8, micro_batch_size=2, gradient_accumulation_steps=4)) == found


def test_a_fraction_of_the_steps_as_warmup(make):
    assert arguments(make(warmup_steps=0.1))["warmup_steps"] == 0.1
    with pytest.raises(ConfigError, match="warmup_steps"):
        make(warmup_steps=1.5)


@pytest.mark.parametrize(
    ("keys", "loads_best"),
    [
        ({"eval_steps": 2, "save_steps": 4}, True),
        ({"eval_steps": 0.1, "save_steps": 0.2}, True),
        ({"evals_per_epoch": 4, "saves_per_epoch": 2}, True),
        ({}, True),  # both every epoch
        ({"eval_steps": 2, "save_strategy": "best"}, True),
        ({"eval_steps": 2, "save_steps": 3}, None),
        ({"eval_steps": 2, "save_steps": 0.5}, None),
        ({"eval_steps": 2}, None),
        ({"saves_per_epoch": 0}, None),
        ({"eval_steps": 2, "save_steps": 4, "load_best_model_at_end": False}, False),
    ],
)
def test_a_run_that_stops_early_loads_its_best_checkpoint(make, keys, loads_best):
    from transformers import TrainingArguments

    config = make(early_stopping_patience=2, val_set_size=2, **keys)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = arguments(config, has_eval=True)
    assert found.get("load_best_model_at_end") is loads_best
    assert any("the result is the last model" in str(each.message) for each in caught) == (loads_best is None)
    TrainingArguments(**found)
    assert "load_best_model_at_end" not in arguments(make(val_set_size=2), has_eval=True)


def test_never_saving_and_evaluating(make):
    found = arguments(make(saves_per_epoch=0, evals_per_epoch=0, val_set_size=2), has_eval=True)
    assert (found["save_strategy"], found["eval_strategy"]) == ("no", "no")


@pytest.mark.parametrize("key", ["early_stopping_patience", "evals_per_epoch"])
def test_held_out_data_is_there_for_what_needs_it(make, key):
    assert getattr(make(val_set_size=2, **{key: 2}), key) == 2
