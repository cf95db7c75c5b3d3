"""What configs of full completions say, are warned of, and are refused for."""

import warnings

import pytest

from ebft import EBFTConfig
from ebft.config.schema import RunConfig
from ebft.errors import ConfigError
from ebft.run.checks import Machine, check_machine, check_runnable
from ebft.run.trainer import planned_steps

ROWS = [{"path": "some/rows", "type": "ebft_opencode.transform"}]
LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
CPU = Machine(has_accelerator=False, supports_bf16=False)


def structured(tmp_path=None, rl="ebft", **keys):
    values = {"base_model": "some/model", "datasets": ROWS, "rl": rl, "micro_batch_size": 8,
              "output_dir": str(tmp_path or "out"), **keys}  # fmt: skip
    return RunConfig.from_dict(values)


@pytest.mark.parametrize(("keys", "message"), [
    ({"rl": "grpo"}, "rl: grpo needs trl.reward_funcs"),
    ({"micro_batch_size": 2, "gradient_accumulation_steps": 3},
     "num_generations: 8 does not divide 6, .*micro_batch_size \\* gradient_accumulation_steps"),
    ({"eval_batch_size": 12}, "eval_batch_size: 12 is not a multiple of trl.num_generations: 8"),
    ({"trl": {"multi_objective_aggregation": "normalize_then_sum"}},
     "trl.multi_objective_aggregation: normalize_then_sum .* Set ebft.advantage_estimator: group_norm"),
    ({"trl": {"async_prefetch": True}}, "trl.async_prefetch requires a vLLM server"),
    ({"trl": {"use_vllm": True, "vllm_mode": "colocate"}}, "vllm_mode: colocate needs vLLM in this environment"),
    ({"trl": {"reward_funcs": ["json.loads"], "reward_weights": [1.0]}}, "1 weights for 2 rewards: feature_"),
    ({"trl": {"reward_funcs": ["feature_matching"]}}, "feature_matching, feature_matching contains a duplicate"),
    ({"trl": {"reward_funcs": ["nomodule.f"]}},
     "'nomodule.f' refers to function 'f'.* Run the command in the folder of nomodule, or add "),
    ({"trl": {"vllm_guided_decoding_regex": "a"}}, "vllm_guided_decoding_regex requires vLLM"),
    ({"trl": {"sync_ref_model": True}}, "sync_ref_model requires a reference model"),
    ({**LORA, "trl": {"use_vllm": True}, "lora_modules_to_save": ["lm_head"]}, "lora_modules_to_save"),
    ({"trl": {"generation_batch_size": 12}}, "generation_batch_size: 12 is not a multiple of trl.num_generations: 8"),
    ({"group_by_length": True}, "group_by_length is incompatible with grouped completions"),
])  # fmt: skip
def test_refused_before_anything_is_loaded(tmp_path, keys, message):
    with warnings.catch_warnings(action="ignore"):
        config = structured(tmp_path, **keys)
    with pytest.raises(ConfigError, match=message):
        check_runnable(config)


def test_full_fine_tuning_cannot_reach_a_server_without_a_gpu(tmp_path):
    with pytest.raises(ConfigError, match="Full fine-tuning with a vLLM server requires CUDA.* Train an adapter"):
        check_machine(structured(tmp_path, trl={"use_vllm": True}), CPU)
    check_machine(structured(tmp_path, trl={"use_vllm": True}, **LORA), CPU)


@pytest.mark.parametrize(("keys", "message"), [
    ({"torch_compile": True}, "torch_compile: true is set to false in structured mode and GRPO"),
    ({"trl": {"streaming_partial_batch": True, "reward_num_workers": 2}}, "no effect with reward_num_workers above"),
    ({"trl": {"streaming_min_groups": 2}}, "no effect without streaming_partial_batch"),
    ({"trl": {"use_data_producer": True}}, "use_data_producer has no effect: generation"),
    ({"trl": {"vllm_sync_interval": 2}}, "trl.vllm_sync_interval: no effect without use_vllm: true"),
    ({"trl": {"prefetch_depth": 2}}, "trl.prefetch_depth has no effect without async_prefetch"),
    ({"rl": "grpo", "ebft": {"ce_coef": 0.5}}, "ebft.ce_coef: no effect with rl: grpo and these rewards"),
    ({"rl": "grpo", "ebft": {"use_whitening": True}}, "ebft.use_whitening: no effect with rl: grpo"),
    ({"train_on_inputs": True}, "train_on_inputs: true has no effect on full completions"),
    ({"sample_packing": True}, "sample_packing: true has no effect on full completions"),
    ({"vllm": {"port": 9000}}, "vllm: has no effect without trl.use_vllm"),
    ({**LORA, "trl": {"use_vllm": True, "vllm_lora_sync": False}}, "vllm_lora_sync: false has no effect"),
    ({"ebft": {"stride": 4}}, "ebft.stride: no effect on training in structured mode"),
    ({"rl": "grpo", "ebft": {"gt_length_floor": 8}}, "ebft.gt_length_floor: no effect with rl: grpo"),
])  # fmt: skip
def test_what_has_no_effect_is_one_warning(keys, message):
    with pytest.warns(UserWarning, match=message):
        structured(**keys)


def test_keys_reach_trls_arguments():
    config = structured(ebft={"use_whitening": True, "adaptive_max_tokens": False, "feature_layers": [0.5]},
                        trl={"num_generations": 4, "temperature": 0.9, "vllm_importance_sampling_cap": 2.0,
                             "vllm_guided_decoding_regex": "a+", "vllm_sync_interval": 3, "scale_rewards": False},
                        micro_batch_size=2)  # fmt: skip
    kwargs = config.method.own_arguments(config)
    wanted = {"num_generations": 4, "temperature": 0.9, "vllm_importance_sampling_clip_max": 2.0,
              "vllm_structured_outputs_regex": "a+", "vllm_sync_interval": 3, "scale_rewards": False,
              "loss_type": "grpo", "use_whitening": True, "adaptive_max_tokens": False, "feature_layers": [0.5],
              "per_device_eval_batch_size": 4}  # fmt: skip
    assert {name: kwargs[name] for name in wanted} == wanted
    assert "beta" not in kwargs  # unset: TRL's own default
    grpo = structured(rl="grpo")
    assert not {"feature_layers", "adaptive_max_tokens"} & grpo.method.own_arguments(grpo).keys()


def test_the_trainer_connects_to_where_the_server_listens():
    server, trl = {"port": 9001, "host": "10.0.0.1"}, {"use_vllm": True}
    assert structured(vllm=server, trl=trl).server_address == ("10.0.0.1", 9001)
    other = {"vllm_server_host": "gpu", "vllm_server_port": 9002}
    assert structured(vllm=server, trl=trl | other).server_address == ("gpu", 9002)
    managed = {**trl, "vllm_mode": "managed", "vllm_server_port": 9001}  # training starts it
    with pytest.raises(ConfigError, match="vllm.port: 9002 and trl.vllm_server_port: 9001 differ: .* Keep one of them"):
        structured(vllm={"port": 9002}, trl=managed)
    structured(vllm={"port": 9001}, trl=managed)
    structured(trl=managed)


def test_two_completions_have_no_diversity_gradient_with_a_common_baseline(tmp_path):
    common = {"output_dir": str(tmp_path), "report_to": "none", "per_device_train_batch_size": 4}
    for options in ({"advantage_estimator": "grpo"}, {"rloo_baseline": "mean"}):
        with pytest.warns(UserWarning, match="diversity_coef has no effect on the gradient with num_generations: 2"):
            EBFTConfig(**common, num_generations=2, **options)
        EBFTConfig(**common, num_generations=2, diversity_coef=0.0, **options)
    with warnings.catch_warnings(action="error", category=UserWarning):
        EBFTConfig(**common, num_generations=2)
        EBFTConfig(**common, num_generations=4)


def test_steps_count_prompts():
    config = structured(trl={"num_generations": 4}, micro_batch_size=2, gradient_accumulation_steps=4, num_epochs=3)
    # 8 completions per step are 2 prompts; 11 prompts fill 5 steps, the last prompt is left out.
    assert planned_steps(config, CPU, rows=11) == 15
    twice = structured(trl={"num_generations": 2, "num_iterations": 2, "generation_batch_size": 8}, micro_batch_size=2)
    # 4 prompts per generation of 4 micro-steps, each used twice.
    assert planned_steps(twice, CPU, rows=8) == 16
