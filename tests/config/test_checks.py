import pytest

from ebft.config.axolotl import IGNORED_KEYS, UNTYPED, CarriedOverKeys
from ebft.errors import ConfigError
from ebft.run.checks import check_runnable
from tests.config.conftest import warned

LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
STRIDED = {"rl": "ebft", "ebft": {"mode": "strided"}}
EXPERTS = {**LORA, "lora_target_parameters": ["mlp.experts.down_proj"]}
PROMPTS = {"datasets": [{"path": "some/rows", "type": "ebft_opencode.transform"}], "rl": "ebft"}
VLLM = {**PROMPTS, "trl": {"use_vllm": True, "vllm_mode": "managed"}}


@pytest.mark.parametrize(("keys", "message"), [
    ({"adapter": "lora"}, "adapter: lora needs lora_r"),
    ({**LORA, "lora_target_linear": False}, "Set lora_target_linear: true"),
    ({**LORA, "lora_target_modules": ".*q_proj"}, "lora_target_modules is also set, to a regular expression"),
    ({**LORA, "adapter": "qlora"}, "Add load_in_4bit: true"),
    ({**LORA, "rl": "ebft", "ebft": {"mode": "strided", "feature_device": "cpu"}}, "no effect with an adapter"),
    ({"load_in_4bit": True}, "Set adapter: qlora"),
    ({**LORA, "load_in_8bit": True, "gguf_file": "a.gguf"}, "`ebft fetch some/model/a.gguf --output DIR`, and set"),
    ({**LORA, "load_in_8bit": True, "base_model": "b/a.gguf"}, "`ebft fetch b/a.gguf --output DIR`, and set"),
    ({"gguf_file": "a.gguf", "rl": "ebft", "trl": {"use_vllm": True, "vllm_mode": "managed"}},
     "some/model/a.gguf is a GGUF file, which cannot be served with vLLM"),
    ({**LORA, "load_in_4bit": True}, "Set adapter: qlora"),
    ({"load_in_8bit": True}, "Set adapter: lora"),
    ({"load_in_4bit": True, "load_in_8bit": True}, "Keep one"),
    ({"bf16": True, "fp16": True}, "bf16 and fp16"),
    ({"warmup_steps": 1, "warmup_ratio": 0.1}, "warmup_steps and warmup_ratio"),
    ({"save_steps": 5, "saves_per_epoch": 2}, "save_steps and saves_per_epoch"),
    ({"save_steps": 5, "save_strategy": "epoch"},
     r"save_steps conflicts with save_strategy: epoch. Remove it \(as an override: save_steps=\)"),
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
    ({"fsdp": True, "fsdp_config": {"activation_checkpointing": True}, "gradient_checkpointing": True}, "are both set"),
    ({**STRIDED, "fsdp": True, "fsdp_config": {"activation_checkpointing": True}}, "only supported by SFT"),
    ({"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}, "save_only_model": True},
     "save_only_model: true is incompatible with"),
    ({"fsdp": True, "save_only_model": True, "load_best_model_at_end": True, "val_set_size": 2},
     "cannot both be set with fsdp"),
    ({"model_type": "AutoModelForSequenceClassification"}, "Set reward_model: true, or remove model_type"),
    ({"model_type": "AutoModelForTokenClassification"}, "Set process_reward_model: true"),
    ({"model_type": "AutoModelForMaskedLM"}, "is not a causal language model"),
    ({**LORA, "peft_layers_pattern": "layers"}, "no effect without peft_layers_to_transform"),
    ({**LORA, "lora_target_linear": False, "lora_target_modules": ".*q", "peft_layers_to_transform": 1},
     "peft_layers_to_transform is not supported with a regular expression"),
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
])  # fmt: skip
def test_a_contradiction_names_the_way_out(make, keys, message):
    with pytest.raises(ConfigError, match=message):
        make(**keys)


NO_REWARD = {"alignment_coef": 0.0, "diversity_coef": 0.0}
NO_DATA = "no effect because there is no held-out data, so nothing is evaluated during training. Set val_set_size or "
SFT = "no effect with SFT (rl is not set)"
NO_WHITENING = "ebft.whitening_space: no effect without ebft.use_whitening: true."
ALWAYS_ZERO = "...the feature-matching reward is always 0"
GRPO = {"rl": "grpo", "trl": {"reward_funcs": ["feature_matching"]}}
strided = lambda **options: {"rl": "ebft", "ebft": {"mode": "strided", **options}}


@pytest.mark.parametrize(("keys", "message"), [  # the only warning, its start (with ... at the end), or a part of it
    *(({key: value, "val_set_size": 0.0}, f"{key}: {NO_DATA}test_datasets.")
      for key, value in (
          ("eval_steps", 5), ("eval_on_start", True), ("eval_strategy", "epoch"), ("evals_per_epoch", 4))),
    ({"eval_steps": 5, "eval_on_start": True, "eval_strategy": "steps", "val_set_size": 2}, None),
    ({"eval_strategy": "epoch", "val_set_size": 2}, None), ({"evals_per_epoch": 4, "val_set_size": 2}, None),
    ({"ebft": {"mode": "strided"}}, f"ebft: {SFT}. Set rl: ebft..."),
    ({"ebft": {"stride": 4}, "trl": {"beta": 0.1}, "vllm": {"port": 8000}}, f"ebft, trl, vllm: {SFT}. Set rl: ebft..."),
    ({"ebft": {"mask_thinking_ce": True}, "trl": {"beta": 0.1}}, f"trl: {SFT}. Set rl: ebft..."),
    ({"ebft": {"mask_thinking_ce": True}}, None),
    ({"lora_r": 8, "lora_alpha": 16},
     "lora_r, lora_alpha: no effect because adapter is not set (all weights are trained)."),
    ({"peft_use_dora": True, "peft_layers_to_transform": [1]},
     "peft_use_dora, peft_layers_to_transform: no effect because adapter..."),
    ({**LORA, "lora_target_modules": ["q_proj", "embed_tokens"]},
     "lora_target_modules: q_proj, embed_tokens: adapted in addition to all linear layers, which ..."),
    ({"torch_compile": True}, None),
    ({**STRIDED, "torch_compile": True}, "torch_compile: true is set to false in strided..."),
    ({**strided(gt_length_multiplier=2.0), "trl": {"epsilon": 0.1}, "vllm": {"port": 8001}},
     "ebft.gt_length_multiplier, trl, vllm: no effect on training in strided mode, only in structured mode."),
    ({"rl": "ebft", "ebft": {"stride": 4, "rl_coef": 0.5}},
     "ebft.rl_coef, ebft.stride: no effect on training in structured mode, only in strided mode."),
    ({**strided(stride=4, ce_coef=0.1, use_whitening=True), "rl": "grpo"},
     "ebft.ce_coef, ebft.mode, ebft.stride, ebft.use_whitening: no effect with rl: grpo and these rewards."),
    ({**STRIDED, "train_on_inputs": True}, "train_on_inputs: true has no effect in strided mode..."),
    (strided(n_samples_per_prompt=1), "...n_samples_per_prompt: 1"),
    ({"budget": {"generated_tokens": 10}}, f"budget.generated_tokens: {SFT}, which does not sample tokens."),
    ({"budget": {"documents": 10, "flops": 1e9}}, None),
    (strided(**NO_REWARD), ALWAYS_ZERO), ({"rl": "ebft", "ebft": NO_REWARD}, ALWAYS_ZERO),
    ({**GRPO, "ebft": NO_REWARD}, ALWAYS_ZERO),
    (strided(whitening_space="sample"), "ebft.whitening_space: no effect without..."),
    ({"rl": "ebft", "ebft": {"whitening_space": "feature"}}, f"...{NO_WHITENING}"),
    ({**GRPO, "ebft": {"whitening_space": "sample"}}, f"...{NO_WHITENING}"),
    *((strided(rloo_baseline="mean", advantage_estimator=name),
       f"...ebft.rloo_baseline: no effect with ebft.advantage_estimator: {name}.")
      for name in ("reinforce", "group_norm")),
    (strided(use_whitening=True, whitening_space="sample", rloo_baseline="mean", alignment_coef=0.0), None),
])  # fmt: skip
def test_what_has_no_effect_is_one_warning(make, keys, message):
    config, messages = warned(make, **keys)
    assert len(messages) == (message is not None)
    if message and message.startswith("..."):
        assert message[3:] in messages[0]
    elif message and message.endswith("..."):
        assert messages[0].startswith(message[:-3])
    elif message:
        assert messages == [message]
    assert config.torch_compile is (keys.get("torch_compile", False) and keys.get("rl") is None)
    assert config.method.name.startswith("SFT") == (keys.get("rl") is None)


def test_what_replaces_what(make):
    config = warned(make, **strided(n_samples_per_prompt=1))[0]
    assert config.ebft.advantage_estimator == "reinforce" and config.ebft.diversity_coef == 0
    assert make(adapter="lora", lora_model_dir="some/adapter").lora_r is None  # the adapter has its own settings
    assert make(wandb_run_id="run-7").wandb_name == "run-7"
    assert make(wandb_run_id="run-7", wandb_name="mine").wandb_name == "mine"
    keys = {"torch_compile": True, "budget": {"flops": 1e18}}
    with pytest.raises(ConfigError, match="budget.flops is not supported with torch_compile"):
        make(**keys)
    assert warned(make, **keys, **STRIDED)[0].torch_compile is False


def test_ignored_keys_say_once_that_they_have_no_effect(make):
    assert set(IGNORED_KEYS) == set(CarriedOverKeys.model_fields)
    values = {"save_safetensors": False, "profiler_steps": [1, 2], "local_rank": 1, "fsdp_version": 1}
    values |= dict.fromkeys(("model_type", "tokenizer_type"), "LlamaForCausalLM")
    for key in IGNORED_KEYS:
        value = values.get(key, "another value" if key in UNTYPED else True)
        messages = warned(make, **{key: value})[1]
        said = [message for message in messages if message.startswith(f"{key}: ") and "has no effect" in message]
        assert len(messages) == len(said) == (key != "strict"), key
    harmless = {key: ignored.harmless[0] for key, ignored in IGNORED_KEYS.items() if ignored.harmless}
    assert warned(make, **harmless)[1] == []


@pytest.mark.parametrize(("ebft", "zero"), [
    ({"mode": "strided", "rl_coef": 0.0}, "rl_coef: 0 and ce_coef: 0"),
    ({"mode": "strided", **NO_REWARD}, "alignment_coef: 0 with diversity_coef: 0 and ce_coef: 0"),
    ({"mode": "strided", "alignment_coef": 0.0, "n_samples_per_prompt": 1}, "alignment_coef: 0 with diversity_coef"),
    (NO_REWARD, "ebft.alignment_coef: 0 with ebft.diversity_coef: 0 and ebft.ce_coef: 0"),
])  # fmt: skip
def test_a_loss_that_is_always_zero_is_refused(make, tmp_path, ebft, zero):
    keys = {"rl": "ebft", "output_dir": str(tmp_path), "micro_batch_size": 8}
    if "mode" not in ebft:
        keys["datasets"] = [{"path": "some/rows", "type": "ebft_opencode.transform"}]
    with pytest.raises(ConfigError, match=f"{zero}.*the loss is always 0"):
        check_runnable(warned(make, **keys, ebft=ebft)[0])
    check_runnable(warned(make, **keys, ebft={**ebft, "ce_coef": 0.1})[0])


@pytest.mark.parametrize(("keys", "message"), [
    ({"base_model": "outputs/a", "output_dir": "outputs/x/../a/"}, "is the folder of base_model, whose files"),
    ({"tokenizer_config": "words", "output_dir": "words"}, "is the folder of tokenizer_config"),
    ({"base_model": "smollm2-135m", "output_dir": "./smollm2-135m"}, "is (also the name|the folder) of base_model"),
    ({"base_model": "outputs/a/checkpoint-2", "output_dir": "outputs/a"}, "a checkpoint of an earlier run"),
])  # fmt: skip
def test_the_output_is_not_where_training_starts_from(make, tmp_path, monkeypatch, keys, message):
    monkeypatch.chdir(tmp_path)
    for folder in ("outputs/a/checkpoint-2", "words"):
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(ConfigError, match=message):
        check_runnable(make(**keys))


def test_a_fetched_model_is_not_hidden_by_the_output(make, tmp_path, monkeypatch):
    """Its folder is in the cache, but a folder of its name would take precedence from then on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ebft.catalog.fetched_folder", lambda name: tmp_path / "cache" / name)
    with pytest.raises(ConfigError, match="output_dir: smollm2-135m is also the name of base_model"):
        check_runnable(make(base_model="smollm2-135m", output_dir="smollm2-135m"))


@pytest.mark.parametrize("given", ["all-linear", ["all-linear"]])
@pytest.mark.parametrize("linear", [{}, {"lora_target_linear": True}])
def test_all_linear_is_an_alias_also_in_the_config_that_a_run_saves(make, given, linear):
    keys = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_modules": given, **linear}
    config, messages = warned(make, **keys)
    assert config.lora_target_linear and config.lora_target_modules is None and messages == []
    assert warned(type(config).from_dict, values=config.model_dump(exclude_unset=True)) == (config, [])


def test_what_adapters_may_be_given(make):
    keys = {**EXPERTS, "lora_target_linear": False}  # parameters are targets enough
    assert make(**keys).lora_target_parameters == ["mlp.experts.down_proj"]
    config, messages = warned(make, **LORA, **PROMPTS, micro_batch_size=4, peft_use_dora=True)  # without vLLM
    assert config.peft_use_dora and messages == []
