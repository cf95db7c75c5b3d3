import warnings

import pytest

from ebft import EBFTConfig
from ebft.config.options import StridedOptions
from ebft.config.section import option_names
from ebft.errors import ConfigError
from ebft.run.checks import Machine
from ebft.run.trainer import planned_steps, training_kwargs
from ebft.transformers_internals import checkpointing_argument
from tests.config.conftest import warned
from tests.config.test_messages import CPU, GPU, PREFERENCES, PROMPTS, config

AMPERE = Machine(has_accelerator=True, supports_bf16=True, supports_tf32=True)
TWO = Machine(has_accelerator=True, supports_bf16=True, processes=2)
EVAL = {"val_set_size": 2}
COMPARISONS = {"datasets": [{"path": "a", "type": "bradley_terry.chat_template"}], "reward_model": True}
FSDP = {"offload_params": True, "fsdp_sharding_strategy": "SHARD_GRAD_OP", "use_orig_params": True}
FSDP["final_state_dict_type"] = "FULL_STATE_DICT"
RESHARD = {"fsdp": True, "fsdp_config": {"cpu_offload": True, "reshard_after_forward": False}}
LAYERS = {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
WRAPPED = {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "cpu_offload": True}
REENTRANT = {"use_reentrant": True}
DETAILS = {"gradient_checkpointing_kwargs": REENTRANT}
CHECKPOINTING = checkpointing_argument()
SAME = {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 8, "neftune_noise_alpha": 5.0, "torch_compile": True}
SAME |= {"torch_compile_backend": "inductor", "trackio_space_id": "me/space", "ddp_timeout": 7200}
BATCH = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


def kwargs(config, machine=CPU, rows=100, has_eval=False):
    return training_kwargs(config, machine, rows, has_eval)


@pytest.mark.parametrize(("keys", "machine", "expected"), [  # `...`: left to transformers
    ({}, CPU, {"use_cpu": True, "bf16": False, "lr_scheduler_type": "cosine", "eval_strategy": ..., "optim_args": ...,
               "load_best_model_at_end": ..., **dict.fromkeys((
                   "max_steps", "warmup_steps", "tf32", "data_seed", "run_name", "push_to_hub"), ...)}),
    ({}, GPU, {"use_cpu": False, "bf16": True}), ({"fp16": True}, GPU, {"bf16": False}),
    ({"micro_batch_size": 3, "num_epochs": 2, "optimizer": "sgd", "lr_scheduler": "linear", "wandb_name": "a"}, CPU,
     {"per_device_train_batch_size": 3, "per_device_eval_batch_size": 3, "num_train_epochs": 2, "optim": "sgd",
      "lr_scheduler_type": "linear", "run_name": "a"}),
    ({}, CPU, {"save_strategy": "epoch", "save_steps": ...}),
    ({"save_steps": 0.5}, CPU, {"save_strategy": "steps", "save_steps": 0.5}),
    ({"save_strategy": "no"}, CPU, {"save_strategy": "no", "save_steps": ...}),
    ({"saves_per_epoch": 5, "micro_batch_size": 2, "gradient_accumulation_steps": 5}, CPU,
     {"save_strategy": "steps", "save_steps": 2}),
    ({"saves_per_epoch": 2, "evals_per_epoch": 4, "max_steps": 20, **EVAL}, CPU, {"save_steps": 10, "eval_steps": 5}),
    ({"saves_per_epoch": 1, "evals_per_epoch": 4, "max_steps": 9, "load_best_model_at_end": True, **EVAL}, CPU,
     {"save_steps": 8, "eval_steps": 2}),
    ({"saves_per_epoch": 500}, CPU, {"save_strategy": "steps", "save_steps": 1}),
    ({"saves_per_epoch": 5}, TWO, {"save_steps": 10}),  # counts all processes
    (EVAL, CPU, {"eval_strategy": "epoch", "load_best_model_at_end": ...}),
    ({**EVAL, "eval_steps": 3}, CPU, {"eval_steps": 3}),
    ({"saves_per_epoch": 0, "evals_per_epoch": 0, **EVAL}, CPU, {"save_strategy": "no", "eval_strategy": "no"}),
    ({"gradient_checkpointing": True, **DETAILS}, CPU, {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": REENTRANT}),
    (DETAILS, CPU, {CHECKPOINTING: False, f"{CHECKPOINTING}_kwargs": ...}),
    ({"fsdp": ["full_shard", "offload"], "fsdp_config": LAYERS}, CPU, {"fsdp": True, "fsdp_config": WRAPPED}),
    ({"fsdp": "shard_grad_op auto_wrap"}, CPU, {"fsdp_config": {"reshard_after_forward": False}}),
    ({"fsdp": False}, CPU, {"fsdp": ...}), ({"fsdp": [], "fsdp_config": FSDP}, CPU, RESHARD),
    ({"hub_model_id": "me/model", "hub_private_repo": True}, CPU,
     {"push_to_hub": True, "hub_model_id": "me/model", "hub_private_repo": True}),
    ({"cosine_min_lr_ratio": 0.25}, CPU,
     {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.25}}),
    (SAME, CPU, SAME), ({"warmup_steps": 0.1}, CPU, {"warmup_steps": 0.1}),
    ({"batch_size": 8, "micro_batch_size": 2}, CPU, BATCH),
    ({"batch_size": 8, "gradient_accumulation_steps": 4}, CPU, BATCH),
    ({"optimizer": "sgd", "optim_args": {"momentum": 0.9, "dampening": 0.1}}, CPU,
     {"optim_args": "momentum=0.9,dampening=0.1"}),
    ({"tf32": True}, GPU, {"tf32": ...}), ({"tf32": True}, AMPERE, {"tf32": True}),
    ({"fp16": True, "bf16": False}, GPU, {"fp16": True}),
])  # fmt: skip
def test_keys_become_arguments_of_transformers(make, keys, machine, expected):
    found = kwargs(make(**keys), machine, has_eval="val_set_size" in keys)
    assert {name: found.get(name, ...) for name in expected} == expected


def test_transformers_knows_every_argument(make, tmp_path):
    from transformers import TrainingArguments

    config = make(output_dir=str(tmp_path), warmup_ratio=0.1, group_by_length=True, fp16=False, max_steps=3)
    args = TrainingArguments(**kwargs(config))
    assert args.warmup_steps == 0.1 and args.train_sampling_strategy == "group_by_length"
    assert args.max_steps == 3 and args.num_train_epochs == 1
    assert kwargs(make(deepspeed="zero2"))["deepspeed"]["zero_optimization"]["stage"] == 2
    assert make(torch_compile="auto").torch_compile is False


@pytest.mark.parametrize(("keys", "loads_best"), [
    ({"evals_per_epoch": 4, "saves_per_epoch": 2}, True), ({}, True),  # both every epoch
    ({"eval_steps": 2, "save_strategy": "best"}, True), ({"eval_steps": 2, "save_steps": 3}, None),
    ({"eval_steps": 2, "save_steps": 0.5}, None), ({"eval_steps": 2}, None),
    ({"eval_steps": 2, "save_steps": 4, "load_best_model_at_end": False}, False),
])  # fmt: skip
def test_a_run_that_stops_early_loads_its_best_checkpoint(make, keys, loads_best):
    from transformers import TrainingArguments

    config = make(early_stopping_patience=2, **EVAL, **keys)
    found, said = warned(kwargs, config=config, has_eval=True)
    assert found.get("load_best_model_at_end") is loads_best
    assert any("the result is the last model" in text for text in said) == (loads_best is None)
    TrainingArguments(**found)


@pytest.mark.parametrize(("variable", "keys", "machine", "message"), [
    ("bf16", {"bf16": False}, GPU, "ACCELERATE_MIXED_PRECISION is bf16 in the environment, and no by bf16"),
    ("bf16", {}, CPU, "is bf16 in the environment, and no by bf16 and fp16"),
    ("fp16", {"bf16": True}, GPU, "is fp16 in the environment, and bf16 by bf16"),
    ("fp8", {}, CPU, "ACCELERATE_MIXED_PRECISION is fp8"),
])  # fmt: skip
def test_the_precision_is_that_of_the_config(make, monkeypatch, variable, keys, machine, message):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", variable)
    with pytest.raises(ConfigError, match=message):
        kwargs(make(**keys), machine)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert kwargs(make(bf16=True))["bf16"] is True


def test_every_ebft_option_reaches_the_trainer(make):
    config = make(rl="ebft", ebft={"mode": "strided", "stride": 3})
    assert set(config.method.own_arguments(config)) == {*option_names(StridedOptions), "log_rollouts", "max_length"}
    assert config.method.own_arguments(config)["stride"] == 3


@pytest.mark.parametrize("method", [{"rl": "dpo", **PREFERENCES}, {"rl": "ipo", **PREFERENCES}, COMPARISONS])
def test_offloading_is_passed_to_the_trainers_of_trl(make, method):
    config = make(**method, activation_offloading=True)
    assert kwargs(config, GPU)["activation_offloading"] is True
    assert "activation_offloading" not in kwargs(config)
    assert "activation_offloading" in config.method.arguments_class().__dataclass_fields__


def structured(**keys):
    return config(**{**PROMPTS, **keys})


def test_keys_reach_trls_arguments():
    made = structured(ebft={"use_whitening": True, "adaptive_max_tokens": False, "feature_layers": [0.5]},
                        trl={"num_generations": 4, "temperature": 0.9, "vllm_importance_sampling_cap": 2.0,
                             "vllm_importance_sampling_clip_min": 0.5,
                             "vllm_guided_decoding_regex": "a+", "vllm_sync_interval": 3, "scale_rewards": False},
                        micro_batch_size=2)  # fmt: skip
    found = made.method.own_arguments(made)
    wanted = {"num_generations": 4, "temperature": 0.9, "vllm_importance_sampling_clip_max": 2.0,
              "vllm_importance_sampling_clip_min": 0.5,
              "vllm_structured_outputs_regex": "a+", "vllm_sync_interval": 3, "scale_rewards": False,
              "loss_type": "grpo", "use_whitening": True, "adaptive_max_tokens": False, "feature_layers": [0.5],
              "per_device_eval_batch_size": 4}  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted
    assert "beta" not in found  # unset: TRL's own default
    grpo = structured(rl="grpo")
    assert not {"feature_layers", "adaptive_max_tokens"} & grpo.method.own_arguments(grpo).keys()


def test_the_trainer_connects_to_where_the_server_listens():
    server, trl = {"port": 9001, "host": "10.0.0.1"}, {"use_vllm": True}
    assert structured(vllm=server, trl=trl).server_address == ("10.0.0.1", 9001)
    other = {"vllm_server_host": "gpu", "vllm_server_port": 9002}
    assert structured(vllm=server, trl=trl | other).server_address == ("gpu", 9002)
    managed = {**trl, "vllm_mode": "managed", "vllm_server_port": 9001}  # training starts it
    with pytest.raises(ConfigError, match="vllm.port: 9002 and trl.vllm_server_port: 9001 differ .* Keep one"):
        structured(vllm={"port": 9002}, trl=managed)
    structured(vllm={"port": 9001}, trl=managed)
    structured(trl=managed)


def test_two_completions_have_no_diversity_gradient_with_a_common_baseline(tmp_path):
    common = {"output_dir": str(tmp_path), "report_to": "none", "per_device_train_batch_size": 4}
    for options in ({"advantage_estimator": "grpo"}, {"rloo_baseline": "mean"}):
        with pytest.warns(UserWarning, match="diversity_coef has no effect on the gradient with num_generations: 2"):
            EBFTConfig(**common, num_generations=2, **options)
    with warnings.catch_warnings(action="error", category=UserWarning):
        EBFTConfig(**common, num_generations=2)


def test_steps_count_prompts():
    made = structured(trl={"num_generations": 4}, micro_batch_size=2, gradient_accumulation_steps=4, num_epochs=3)
    # 8 completions per step are 2 prompts; 11 prompts are 6 steps, the last of which has one prompt of the others.
    assert planned_steps(made, CPU, rows=11) == 18
    twice = structured(trl={"num_generations": 2, "num_iterations": 2, "generation_batch_size": 8}, micro_batch_size=2)
    assert planned_steps(twice, CPU, rows=8) == 16  # 4 prompts per generation of 4 micro-steps, each used twice
