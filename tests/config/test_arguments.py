import pytest

from ebft.config.options import StridedOptions
from ebft.config.section import option_names
from ebft.errors import ConfigError
from ebft.run.checks import Machine
from ebft.run.trainer import training_kwargs

CPU = Machine(has_accelerator=False, supports_bf16=False)
GPU = Machine(has_accelerator=True, supports_bf16=True)


def kwargs(config, machine=CPU, rows=100, has_eval=False):
    return training_kwargs(config, machine, rows, has_eval)


def test_transformers_knows_every_argument(make, tmp_path):
    from transformers import TrainingArguments

    config = make(output_dir=str(tmp_path), warmup_ratio=0.1, group_by_length=True, fp16=False, max_steps=3)
    args = TrainingArguments(**kwargs(config))
    assert args.warmup_steps == 0.1 and args.train_sampling_strategy == "group_by_length"
    assert args.max_steps == 3 and args.num_train_epochs == 1


def test_names_are_translated(make):
    found = kwargs(make(micro_batch_size=3, num_epochs=2, optimizer="sgd", lr_scheduler="linear", wandb_name="a"))
    assert found["per_device_train_batch_size"] == 3 and found["per_device_eval_batch_size"] == 3
    assert (found["num_train_epochs"], found["optim"], found["lr_scheduler_type"]) == (2, "sgd", "linear")
    assert found["run_name"] == "a"


def test_unset_keys_are_left_to_transformers(make):
    assert not {"max_steps", "warmup_steps", "tf32", "data_seed", "run_name", "push_to_hub"} & set(kwargs(make()))


@pytest.mark.parametrize(
    ("keys", "machine", "expected"),
    [
        ({}, CPU, False),
        ({}, GPU, True),
        ({"fp16": True}, GPU, False),
        ({"bf16": True}, CPU, True),
        ({"bf16": False}, GPU, False),
    ],
)
def test_bf16(make, keys, machine, expected):
    assert kwargs(make(**keys), machine)["bf16"] is expected


@pytest.mark.parametrize(
    ("variable", "keys", "machine", "message"),
    [
        (
            "bf16",
            {"bf16": False},
            GPU,
            "ACCELERATE_MIXED_PRECISION is bf16, which contradicts bf16: false of the config",
        ),
        ("bf16", {}, CPU, "contradicts bf16: auto .* Set bf16: true in the config, or unset"),
        ("fp16", {"bf16": True}, GPU, "contradicts fp16: false .* Set fp16: true"),
        ("fp8", {}, CPU, "ACCELERATE_MIXED_PRECISION is fp8"),
    ],
)
def test_the_precision_is_that_of_the_config(make, monkeypatch, variable, keys, machine, message):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", variable)
    with pytest.raises(ConfigError, match=message):
        kwargs(make(**keys), machine)
    for same in ("no", "bf16"):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", same)
        assert kwargs(make(bf16=True))["bf16"] is True


def test_cpu_without_an_accelerator(make):
    assert kwargs(make(), CPU)["use_cpu"] is True and kwargs(make(), GPU)["use_cpu"] is False


@pytest.mark.parametrize(
    ("keys", "strategy", "steps"),
    [
        ({}, "epoch", None),
        ({"save_steps": 7}, "steps", 7),
        ({"save_steps": 0.5}, "steps", 0.5),
        ({"save_strategy": "no"}, "no", None),
        ({"saves_per_epoch": 5, "micro_batch_size": 2, "gradient_accumulation_steps": 5}, "steps", 2),
        ({"saves_per_epoch": 500}, "steps", 1),
    ],
)
def test_when_to_save(make, keys, strategy, steps):
    found = kwargs(make(**keys))
    assert (found["save_strategy"], found.get("save_steps")) == (strategy, steps)


def test_per_epoch_counts_all_processes(make):
    machine = Machine(has_accelerator=True, supports_bf16=True, processes=2)
    assert kwargs(make(saves_per_epoch=5), machine)["save_steps"] == 10


def test_evaluation_needs_data(make):
    assert "eval_strategy" not in kwargs(make())
    assert kwargs(make(val_set_size=2), has_eval=True)["eval_strategy"] == "epoch"
    assert kwargs(make(val_set_size=2, eval_steps=3), has_eval=True)["eval_steps"] == 3


def test_gradient_checkpointing_arguments(make):
    details = {"use_reentrant": True}
    on = kwargs(make(gradient_checkpointing=True, gradient_checkpointing_kwargs=details))
    assert on["gradient_checkpointing_kwargs"] == details
    assert "gradient_checkpointing_kwargs" not in kwargs(make(gradient_checkpointing_kwargs=details))


def test_fsdp_in_older_and_newer_words(make):
    older = kwargs(
        make(fsdp=["full_shard", "offload"], fsdp_config={"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"})
    )
    assert older["fsdp"] is True
    assert older["fsdp_config"] == {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "cpu_offload": True}
    assert kwargs(make(fsdp="shard_grad_op auto_wrap"))["fsdp_config"] == {"reshard_after_forward": False}
    assert "fsdp" not in kwargs(make(fsdp=False))
    given = {"offload_params": True, "fsdp_sharding_strategy": "SHARD_GRAD_OP", "use_orig_params": True}
    for switch in ({"fsdp_version": 2}, {"fsdp": True}):
        found = kwargs(make(**switch, fsdp_config={**given, "final_state_dict_type": "FULL_STATE_DICT"}))
        assert found["fsdp"] is True
        assert found["fsdp_config"] == {"cpu_offload": True, "reshard_after_forward": False}


def test_deepspeed_configs_of_the_package(make):
    assert kwargs(make(deepspeed="zero2"))["deepspeed"]["zero_optimization"]["stage"] == 2


def test_hub(make):
    found = kwargs(make(hub_model_id="me/model", hub_private_repo=True))
    assert found["push_to_hub"] is True and found["hub_model_id"] == "me/model" and found["hub_private_repo"] is True


def test_every_ebft_option_reaches_the_trainer(make):
    config = make(rl="ebft", ebft={"mode": "strided", "stride": 3})
    assert set(config.method.own_arguments(config)) == set(option_names(StridedOptions))
    assert config.method.own_arguments(config)["stride"] == 3
