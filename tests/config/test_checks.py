import warnings

import pytest

from ebft.config.axolotl import IGNORED_KEYS, UNTYPED, CarriedOverKeys
from ebft.errors import ConfigError
from ebft.run.checks import check_runnable

LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
STRIDED = {"rl": "ebft", "ebft": {"mode": "strided"}}


def warned(make, **keys):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return make(**keys), [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"adapter": "lora"}, "adapter: lora needs lora_r"),
        ({**LORA, "lora_target_linear": False}, "Set lora_target_linear: true"),
        ({**LORA, "lora_target_modules": ".*q_proj"}, "lora_target_modules is also set, to a regular expression"),
        ({**LORA, "adapter": "qlora"}, "Add load_in_4bit: true"),
        ({**LORA, "rl": "ebft", "ebft": {"mode": "strided", "feature_device": "cpu"}}, "no effect with an adapter"),
        ({"load_in_4bit": True}, "Set adapter: qlora"),
        ({**LORA, "load_in_8bit": True, "gguf_file": "a.gguf"}, "`ebft fetch some/model/a.gguf --output DIR`, and set"),
        ({**LORA, "load_in_8bit": True, "base_model": "b/a.gguf"}, "`ebft fetch b/a.gguf --output DIR`, and set"),
        (
            {"gguf_file": "a.gguf", "rl": "ebft", "trl": {"use_vllm": True, "vllm_mode": "managed"}},
            "some/model/a.gguf is a GGUF file, which cannot be served with vLLM",
        ),
        ({**LORA, "load_in_4bit": True}, "Set adapter: qlora"),
        ({"load_in_8bit": True}, "Set adapter: lora"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "Keep one"),
        ({"bf16": True, "fp16": True}, "bf16 and fp16"),
        ({"warmup_steps": 1, "warmup_ratio": 0.1}, "warmup_steps and warmup_ratio"),
        ({"save_steps": 5, "saves_per_epoch": 2}, "save_steps and saves_per_epoch"),
        (
            {"save_steps": 5, "save_strategy": "epoch"},
            r"save_steps conflicts with save_strategy: epoch. Remove it \(as an override: save_steps=\)",
        ),
        ({"val_set_size": 0.1, "test_datasets": [{"path": "a", "type": "b"}]}, "Keep one"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end needs held-out data"),
        ({"metric_for_best_model": "loss"}, "metric_for_best_model needs held-out data"),
        ({"val_set_size": 2, "metric_for_best_model": "accuracy"}, "'accuracy' is not computed .* Choose from loss"),
        ({**STRIDED, "val_set_size": 2, "metric_for_best_model": "loss"}, "Choose from cfm_loss, "),
        ({"save_strategy": "best"}, "save_strategy: best needs held-out data"),
        ({"resume_from_checkpoint": "a", "auto_resume_from_checkpoints": True}, "Keep one"),
        ({"deepspeed": "zero3.json", "fsdp": True}, "deepspeed and fsdp"),
        ({"fsdp_config": {"version": 2}}, "Add fsdp: true"),
        ({"fsdp": False, "fsdp_version": 2, "fsdp_config": {"version": 2}}, "Add fsdp: true"),
        ({"fsdp": True, "fsdp_version": 1}, "fsdp_version: 1 is not supported, only FSDP2"),
        ({"fsdp": True, "fsdp_config": {"fsdp_version": 1}}, "fsdp_config.version: 1 is not supported"),
        ({"fsdp": "hybrid_shard auto_wrap"}, "'hybrid_shard' is not supported. Set fsdp: true"),
        ({"fsdp": True, "fsdp_config": {"stat_dict_type": "x"}}, "Did you mean 'fsdp_config.state_dict_type'"),
        (
            {"fsdp": True, "fsdp_config": {"activation_checkpointing": True}, "gradient_checkpointing": True},
            "are both set",
        ),
        ({**STRIDED, "fsdp": True, "fsdp_config": {"activation_checkpointing": True}}, "only supported by SFT"),
        (
            {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}, "save_only_model": True},
            "save_only_model: true is incompatible with",
        ),
        (
            {"fsdp": True, "save_only_model": True, "load_best_model_at_end": True, "val_set_size": 2},
            "cannot both be set with fsdp",
        ),
        ({"model_type": "AutoModelForSequenceClassification"}, "Set reward_model: true, or remove model_type"),
        ({"model_type": "AutoModelForTokenClassification"}, "Set process_reward_model: true"),
        ({"model_type": "AutoModelForMaskedLM"}, "is not a causal language model"),
    ],
)
def test_a_contradiction_names_the_way_out(make, keys, message):
    with pytest.raises(ConfigError, match=message):
        make(**keys)


@pytest.mark.parametrize(
    "keys", [{"eval_steps": 5}, {"eval_on_start": True}, {"eval_strategy": "epoch"}, {"evals_per_epoch": 4}]
)
def test_a_schedule_without_held_out_data_warns(make, keys):
    messages = warned(make, **keys, val_set_size=0.0)[1]
    assert messages == [
        f"{next(iter(keys))}: no effect because there is no held-out data, so nothing is evaluated during training. "
        "Set val_set_size or test_datasets."
    ]
    assert warned(make, **keys, val_set_size=2)[1] == []


def test_all_linear_layers_and_further_modules(make):
    message = "lora_target_modules: q_proj, embed_tokens: adapted in addition to all linear layers, which "
    with pytest.warns(UserWarning, match=message):
        make(**LORA, lora_target_modules=["q_proj", "embed_tokens"])


def test_a_saved_adapter_brings_its_own_settings(make):
    assert make(adapter="lora", lora_model_dir="some/adapter").lora_r is None


@pytest.mark.parametrize(
    ("sections", "idle"),
    [
        ({"ebft": {"mode": "strided"}}, "ebft"),
        ({"ebft": {"stride": 4}, "trl": {"beta": 0.1}, "vllm": {"port": 8000}}, "ebft, trl, vllm"),
        ({"ebft": {"mask_thinking_ce": True}, "trl": {"beta": 0.1}}, "trl"),
        ({"ebft": {"mask_thinking_ce": True}}, None),
    ],
)
def test_sections_of_other_methods_warn_once_in_plain_fine_tuning(make, sections, idle):
    config, messages = warned(make, **sections, rl=None)
    assert config.method.name.startswith("SFT")
    assert len(messages) == (idle is not None)
    assert all(message.startswith(f"{idle}: no effect with SFT (rl is not set). Set rl: ebft") for message in messages)


def test_lora_keys_without_an_adapter_warn_once(make):
    _, messages = warned(make, lora_r=8, lora_alpha=16)
    assert messages == ["lora_r, lora_alpha: no effect because adapter is not set (all weights are trained)."]


def test_torch_compile_gives_way_in_strided_mode_only(make):
    config, messages = warned(make, **STRIDED, torch_compile=True)
    assert config.torch_compile is False
    assert len(messages) == 1 and messages[0].startswith("torch_compile") and "strided" in messages[0]
    config, messages = warned(make, torch_compile=True)
    assert config.torch_compile is True and messages == []


def test_options_of_the_other_mode_warn(make):
    ebft = {"mode": "strided", "gt_length_multiplier": 2.0}
    _, messages = warned(make, rl="ebft", ebft=ebft, trl={"epsilon": 0.1}, vllm={"port": 8001})
    idle = "ebft.gt_length_multiplier, trl, vllm"
    assert messages == [f"{idle}: no effect on training in strided mode, only in structured mode."]
    _, messages = warned(make, rl="ebft", ebft={"stride": 4, "rl_coef": 0.5})
    assert messages == ["ebft.rl_coef, ebft.stride: no effect on training in structured mode, only in strided mode."]
    ebft = {"mode": "strided", "stride": 4, "ce_coef": 0.1, "use_whitening": True}
    _, messages = warned(make, rl="grpo", ebft=ebft)
    idle = "ebft.ce_coef, ebft.mode, ebft.stride, ebft.use_whitening"
    assert messages == [f"{idle}: no effect with rl: grpo and these rewards."]


def test_train_on_inputs_does_nothing_in_strided_mode(make):
    _, messages = warned(make, **STRIDED, train_on_inputs=True)
    assert len(messages) == 1 and messages[0].startswith("train_on_inputs: true has no effect in strided mode")


def test_one_sample_becomes_reinforce_without_diversity(make):
    config, messages = warned(make, rl="ebft", ebft={"mode": "strided", "n_samples_per_prompt": 1})
    assert config.ebft.advantage_estimator == "reinforce" and config.ebft.diversity_coef == 0
    assert len(messages) == 1 and "n_samples_per_prompt: 1" in messages[0]


@pytest.mark.parametrize("key", IGNORED_KEYS)
def test_a_key_without_effect_says_so_once(make, key):
    value = {
        "save_safetensors": False,
        "profiler_steps": [1, 2],
        "local_rank": 1,
        "fsdp_version": 1,
    }.get(key, "another value" if key in UNTYPED else True)
    if key in ("model_type", "tokenizer_type"):
        value = "LlamaForCausalLM"
    _, messages = warned(make, **{key: value})
    if key == "strict":
        assert messages == []
    else:
        assert len(messages) == 1 and messages[0].startswith(f"{key}: ") and "has no effect" in messages[0]


def test_harmless_values_need_no_word(make):
    harmless = {key: ignored.harmless[0] for key, ignored in IGNORED_KEYS.items() if ignored.harmless}
    assert warned(make, **harmless)[1] == []


def test_every_carried_over_key_has_a_reason():
    assert set(IGNORED_KEYS) == set(CarriedOverKeys.model_fields)


def test_wandb_run_id_names_the_run(make):
    assert make(wandb_run_id="run-7").wandb_name == "run-7"
    assert make(wandb_run_id="run-7", wandb_name="mine").wandb_name == "mine"


def test_a_compiled_model_has_no_budget_of_flops(make):
    keys = {"torch_compile": True, "budget": {"flops": 1e18}}
    with pytest.raises(ConfigError, match="budget.flops is not supported with torch_compile"):
        make(**keys)
    assert warned(make, **keys, **STRIDED)[0].torch_compile is False


def test_a_budget_of_sampled_tokens_means_nothing_in_plain_fine_tuning(make):
    _, messages = warned(make, budget={"generated_tokens": 10})
    assert messages == ["budget.generated_tokens: no effect with SFT (rl is not set), which does not sample tokens."]
    assert not warned(make, budget={"documents": 10, "flops": 1e9})[1]


NO_REWARD = {"alignment_coef": 0.0, "diversity_coef": 0.0}


@pytest.mark.parametrize(
    ("rl", "ebft", "message"),
    [
        ("ebft", {"mode": "strided", **NO_REWARD}, "the feature-matching reward is always 0"),
        ("ebft", NO_REWARD, "the feature-matching reward is always 0"),
        ("grpo", NO_REWARD, "the feature-matching reward is always 0"),
        ("ebft", {"mode": "strided", "whitening_space": "sample"}, "ebft.whitening_space: no effect without"),
        ("ebft", {"whitening_space": "feature"}, "ebft.whitening_space: no effect without ebft.use_whitening: true."),
        ("grpo", {"whitening_space": "sample"}, "ebft.whitening_space: no effect without ebft.use_whitening: true."),
        (
            "ebft",
            {"mode": "strided", "rloo_baseline": "mean", "advantage_estimator": "reinforce"},
            "ebft.rloo_baseline: no effect with ebft.advantage_estimator: reinforce.",
        ),
        (
            "ebft",
            {"mode": "strided", "rloo_baseline": "mean", "advantage_estimator": "group_norm"},
            "ebft.rloo_baseline: no effect with ebft.advantage_estimator: group_norm.",
        ),
    ],
)
def test_a_setting_of_the_reward_without_effect_warns_once(make, rl, ebft, message):
    trl = {"trl": {"reward_funcs": ["feature_matching"]}} if rl == "grpo" else {}
    _, messages = warned(make, rl=rl, ebft=ebft, **trl)
    assert len(messages) == 1 and message in messages[0]


def test_settings_of_the_reward_with_an_effect_do_not_warn(make):
    ebft = {"mode": "strided", "use_whitening": True, "whitening_space": "sample", "rloo_baseline": "mean"}
    assert warned(make, rl="ebft", ebft={**ebft, "alignment_coef": 0.0})[1] == []


@pytest.mark.parametrize(
    ("ebft", "zero"),
    [
        ({"mode": "strided", "rl_coef": 0.0}, "rl_coef: 0 and ce_coef: 0"),
        ({"mode": "strided", **NO_REWARD}, "alignment_coef: 0 with diversity_coef: 0 and ce_coef: 0"),
        (
            {"mode": "strided", "alignment_coef": 0.0, "n_samples_per_prompt": 1},
            "alignment_coef: 0 with diversity_coef",
        ),
        (NO_REWARD, "ebft.alignment_coef: 0 with ebft.diversity_coef: 0 and ebft.ce_coef: 0"),
    ],
)
def test_a_loss_that_is_always_zero_is_refused(make, tmp_path, ebft, zero):
    keys = {"rl": "ebft", "output_dir": str(tmp_path), "micro_batch_size": 8}
    if "mode" not in ebft:
        keys["datasets"] = [{"path": "some/rows", "type": "ebft_opencode.transform"}]
    with pytest.raises(ConfigError, match=f"{zero}.*the loss is always 0"):
        check_runnable(warned(make, **keys, ebft=ebft)[0])
    check_runnable(warned(make, **keys, ebft={**ebft, "ce_coef": 0.1})[0])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"base_model": "outputs/a", "output_dir": "outputs/x/../a/"}, "is the folder of base_model, whose files"),
        ({"tokenizer_config": "words", "output_dir": "words"}, "is the folder of tokenizer_config"),
        ({"base_model": "smollm2-135m", "output_dir": "./smollm2-135m"}, "is (also the name|the folder) of base_model"),
        ({"base_model": "outputs/a/checkpoint-2", "output_dir": "outputs/a"}, "a checkpoint of an earlier run"),
    ],
)
def test_the_output_is_not_where_training_starts_from(make, tmp_path, monkeypatch, keys, message):
    monkeypatch.chdir(tmp_path)
    for folder in ("outputs/a/checkpoint-2", "words"):
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(ConfigError, match=message):
        check_runnable(make(**keys))


def test_a_fetched_model_is_not_hidden_by_the_output(make, tmp_path, monkeypatch):
    """Its folder is in the cache, but a folder of its name would take precedence from then on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ebft.data.locate.fetched_folder", lambda name: tmp_path / "cache" / name)
    with pytest.raises(ConfigError, match="output_dir: smollm2-135m is also the name of base_model"):
        check_runnable(make(base_model="smollm2-135m", output_dir="smollm2-135m"))
